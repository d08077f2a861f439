"""What the checks on the loop look for: expressions of RE2, and the proof that a find is what it looks like.

RE2 takes time linear in the text whatever expression and text are, so a pattern of the configuration can't be made to
run for long. A proof (Luhn, the IBAN's checksum, an address's range) narrows a find to the part that is real.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import re2

from serving.gateway.guardrails.folding import fold

Proof = Callable[[str], int | None]
"""How many characters of a find, from its first, are real; None when another may begin in it, 0 when none does."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A check on the loop. `folds`: it looks at the text as a person reads it, else at the characters as they came.

    Of an expression with `num_groups` groups the one that matched is the find; what is around it only says where it
    may stand.
    """

    name: str
    expression: str
    label: str
    proof: Proof | None = None
    folds: bool = True
    num_groups: int = 0


class BadPattern(ValueError):
    """An expression cannot be used; the message says why."""


def options(max_mem_bytes: int = 8 << 20) -> re2.Options:
    """RE2's options: nothing of ours in its log, memory for the automaton bounded."""
    chosen = re2.Options()
    chosen.log_errors = False
    chosen.max_mem = max_mem_bytes
    return chosen


_WHOLE_TEXT = re2.compile(r"(?:^|[^\\])(?:\\\\)*\\[Az]")


def custom(name: str, expression: str) -> Pattern:
    """A pattern of the configuration. `^` and `$` stand for the ends of a line: all texts are read as one.

    Raises:
        BadPattern: RE2 does not know it, it is too large, it finds something in an empty text, or it asks for the
            ends of the whole text.
    """
    if _WHOLE_TEXT.search(expression):
        raise BadPattern(f"{name}: \\A and \\z are of no use here; ^ and $ stand for the ends of a line")
    try:
        compiled = re2.compile(expression, options())
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise BadPattern(
            f"{name}: not an expression that RE2 takes (look-around and back references it does not): {reason}"
        ) from None
    if compiled.search(b"") is not None:
        raise BadPattern(f"{name}: it finds something in every text, an empty one too")
    return Pattern(name, f"(?m:{expression})", "[REDACTED]")


_NOT_WORD = r"[^\pL\pN\pM_]"
# Scripts that put no space between words: a word is found inside others there.
_SPACELESS = re2.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]")


def blocklist(terms: Sequence[str]) -> Pattern | None:
    """Whole words and phrases, whatever their case and the spaces between them; None without any."""
    inside: list[str] = []
    whole: list[str] = []
    for term in sorted({fold(term).strip() for term in terms} - {""}, key=lambda term: (-len(term), term)):
        escaped = r"\s+".join(re2.escape(word) for word in term.split())
        (inside if _SPACELESS.search(term) else whole).append(escaped)
    if not inside and not whole:
        return None
    if not whole:
        return Pattern("blocklist", f"(?i)({'|'.join(inside)})", "[REDACTED]", num_groups=1)
    expression = f"(?i)(?:^|{_NOT_WORD})({'|'.join(whole)})(?:$|{_NOT_WORD})"
    if inside:
        expression = f"(?i)(?:(?:^|{_NOT_WORD})({'|'.join(whole)})(?:$|{_NOT_WORD})|({'|'.join(inside)}))"
    return Pattern("blocklist", expression, "[REDACTED]", num_groups=2 if inside else 1)


_DOUBLED = bytes((digit * 2 - 9 if digit > 4 else digit * 2) for digit in range(10)) + bytes(246)
# Issuers and lengths as their own ranges say; without them one number in ten of any kind would pass.
_CARD = re2.compile(
    r"4(?:[0-9]{12}|[0-9]{15}|[0-9]{18})|5[1-5][0-9]{14}|2(?:22[1-9]|2[3-9][0-9]|[3-6][0-9]{2}|7[01][0-9]|720)[0-9]{12}"
    r"|3[47][0-9]{13}|3(?:0[0-5]|[689][0-9])[0-9]{11,16}|6(?:011|5[0-9]{2}|4[4-9][0-9])[0-9]{12,15}"
    r"|35(?:2[89]|[3-8][0-9])[0-9]{12,15}|62[0-9]{14,17}"
)


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1), and they are not all one."""
    values = bytes(ord(digit) - 48 for digit in digits)
    return (sum(values[-1::-2]) + sum(values[-2::-2].translate(_DOUBLED))) % 10 == 0 and len(set(digits)) > 1


def card_number(found: str) -> int | None:
    """The number of a card that `found` is, or is without its last group (a year, a check code)."""
    for end in (len(found), max(found.rfind(" "), found.rfind("-"))):
        digits = found[: max(end, 0)].replace(" ", "").replace("-", "")
        if _CARD.fullmatch(digits) is not None and luhn(digits):
            return end
    return None


# Lengths of IBANs by country, from the SWIFT IBAN registry (release 99).
_IBANS = """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 ES24
    FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32
    LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24
    RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30
"""
_IBAN_LENGTHS = {entry[:2]: int(entry[2:]) for entry in _IBANS.split()}


def iban(found: str) -> int | None:
    """The account number that `found` begins with, when its country's length and its checksum (ISO 7064) fit."""
    length = _IBAN_LENGTHS.get(found[:2])
    places = [index for index, character in enumerate(found) if character != " "]
    if length is None or len(places) < length:
        return None
    end = places[length - 1] + 1
    if found[end : end + 1].isalnum():
        return None
    number = "".join(found[index] for index in places[:length])
    digits = "".join(str(int(character, 36)) for character in number[4:] + number[:4])
    return end if int(digits) % 97 == 1 else None


def public_address(found: str) -> int | None:
    """`found` when it is an address of the public internet: others say nothing about a person."""
    trimmed = found.rstrip(".:")
    try:
        is_public = ipaddress.ip_address(trimmed).is_global
    except ValueError:
        return None
    return len(trimmed) if is_public else None


def phone_number(found: str) -> int | None:
    """`found` when it has as many digits as a number of the public network (ITU-T E.164)."""
    return len(found) if 8 <= sum(map(str.isdigit, found)) <= 15 else None


def hidden_run(found: str) -> int | None:
    """`found` unless it is the flag of a region, the one proper use of tag characters (Unicode TS 51)."""
    return 0 if found.startswith("\U0001f3f4") else len(found)


_API_KEYS = (
    r"\bsk-[A-Za-z0-9_-]{20,}",
    r"\b(?:sk|rk|pk)_live_[A-Za-z0-9]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{36}",
    r"\bgithub_pat_[A-Za-z0-9_]{22,}",
    r"\bglpat-[A-Za-z0-9_-]{20}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bAIza[0-9A-Za-z_-]{35}",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    r"\bhf_[A-Za-z0-9]{30,}",
    r"\bnpm_[A-Za-z0-9]{36}",
    r"\bpypi-[A-Za-z0-9_-]{40,}",
    r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",
    r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
)
_CARD_SHAPES = (
    r"[0-9]{13,19}",
    r"[0-9]{4}[ -][0-9]{4}[ -][0-9]{4}[ -][0-9]{1,4}(?:[ -][0-9]{1,4})?",
    r"[0-9]{4}[ -][0-9]{6}[ -][0-9]{4,5}(?:[ -][0-9]{1,4})?",
)
# England, Scotland, Wales: the flags of regions that Unicode recommends, spelled in tag characters.
_REGIONS = ("gbeng", "gbsct", "gbwls")
_REGION_FLAG = "|".join("\U0001f3f4" + "".join(chr(0xE0000 + ord(c)) for c in name) + "\U000e007f" for name in _REGIONS)
_TEMPLATE_TOKENS = (
    r"<\|(?:im_start|im_end|im_sep|endoftext|begin_of_text|end_of_text|eot_id|eom_id|start_header_id|end_header_id"
    r"|system|user|assistant|end)\|>",
    r"<(?:start|end)_of_turn>",
    r"\[/?INST\]",
    r"<</?SYS>>",
)


def built_in() -> Iterable[Pattern]:
    """The checks that need no configuration, by the names of core/policies/guardrails.py."""
    hidden = r"[\x{e0000}-\x{e007f}]+|[\x{fe00}-\x{fe0f}\x{e0100}-\x{e01ef}]{2,}"
    yield Pattern("nul", r"\x00+", "", folds=False)
    yield Pattern("control_characters", r"[\x01-\x08\x0b\x0e-\x1f\x7f\x{80}-\x{84}\x{86}-\x{9f}]+", "", folds=False)
    yield Pattern("bidi", r"[\x{202a}-\x{202e}\x{2066}-\x{2069}]+", "", folds=False)
    yield Pattern(
        "invisible_text",
        rf"{_REGION_FLAG}|{hidden}",
        "",
        hidden_run,
        folds=False,
    )
    yield Pattern("template_tokens", "|".join(_TEMPLATE_TOKENS), "[REDACTED]", folds=False)
    yield Pattern("email", r"[A-Za-z0-9_][A-Za-z0-9._%+-]*@[A-Za-z0-9](?:[A-Za-z0-9-]*\.)+[A-Za-z]{2,24}\b", "[EMAIL]")
    yield Pattern(
        "phone",
        r"\+[1-9][0-9 ().-]{6,18}[0-9]\b|\(?\b[2-9][0-9]{2}\)?[ .-][2-9][0-9]{2}[ .-][0-9]{4}\b",
        "[PHONE]",
        phone_number,
    )
    yield Pattern("credit_card", rf"\b(?:{'|'.join(_CARD_SHAPES)})\b", "[CREDIT_CARD]", card_number)
    yield Pattern("iban", r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,40}\b", "[IBAN]", iban)
    yield Pattern(
        "ip_address",
        r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b|\b[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,35}",
        "[IP_ADDRESS]",
        public_address,
    )
    yield Pattern("api_key", "|".join(_API_KEYS), "[API_KEY]")
