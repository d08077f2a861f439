"""What each check finds and what it leaves alone, on plain and on disguised texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.policies.guardrails import CHECKS, Action
from serving.gateway.guardrails.folding import fold, fold_with_origins
from serving.gateway.guardrails.patterns import BadPattern, blocklist, built_in, custom
from serving.gateway.guardrails.scanner import Reading, Scanner, redact

BUILT_IN = Scanner(built_in())
FLAG_ALL = dict.fromkeys(CHECKS, Action.FLAG)
REDACT_ALL = dict.fromkeys(CHECKS, Action.REDACT)

FINDS = [
    ("email", "write to ann.b+x@mail.example.org now", "write to [EMAIL] now"),
    ("email", "größer: ann@example.org.", "größer: [EMAIL]."),
    ("email", "ａｎｎ＠ｅｘａｍｐｌｅ．ｏｒｇ", "[EMAIL]"),
    ("email", "a\u00adnn@exa\u200bmple.org", "[EMAIL]"),
    ("phone", "call +41 44 668 18 00 today", "call [PHONE] today"),
    ("phone", "(212) 555-0123", "[PHONE]"),
    ("credit_card", "card 4111 1111 1111 1111 12", "card [CREDIT_CARD] 12"),
    ("credit_card", "4111111111111111", "[CREDIT_CARD]"),
    ("credit_card", "３７８２ 822463 10005", "[CREDIT_CARD]"),
    ("iban", "to CH93 0076 2011 6238 5295 7 please", "to [IBAN] please"),
    ("iban", "DE89370400440532013000", "[IBAN]"),
    ("ip_address", "from 8.8.8.8.", "from [IP_ADDRESS]."),
    ("ip_address", "2606:4700:4700::1111", "[IP_ADDRESS]"),
    ("api_key", "sk-abcdefghijklmnopqrstuvwx", "[API_KEY]"),
    ("api_key", "AKIAIOSFODNN7EXAMPLE", "[API_KEY]"),
    ("nul", "a\x00b", "ab"),
    ("control_characters", "a\x1b[31mb", "a[31mb"),
    ("bidi", "a\u202eb", "ab"),
    ("invisible_text", "hi\U000e0068\U000e0069!", "hi!"),
    ("invisible_text", "🏴\U000e0068\U000e0069\U000e0021\U000e007f", "🏴"),
    ("template_tokens", "x <|im_start|>system", "x [REDACTED]system"),
    ("template_tokens", "[INST] hi [/INST]", "[REDACTED] hi [REDACTED]"),
]
NOT_FOUND = [
    "order 4111 1111 1111 1112",
    "1234567890123456",
    "version 1.2.3 runs on 10.0.0.1 and 192.168.1.1",
    "CH94 0076 2011 6238 5295 7",
    "a@b, @handle, x@localhost",
    "😀❤️🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "on 2024-11-29 at 12:30:05",
    "tab\tand\r\nlines",
    "sk-learn and risk-averse",
]


def flags(text: str) -> set[str]:
    return {hit.check for hit in BUILT_IN.scan(Reading([text]), FLAG_ALL)}


def redacted(scanner: Scanner, text: str, actions: dict[str, Action] = REDACT_ALL) -> str:
    hits = scanner.scan(Reading([text]), actions)
    return redact(text, [(start, end, hit.label) for hit in hits for start, end in hit.spans])


@pytest.mark.parametrize(("check", "text", "after"), FINDS)
def test_a_find_is_flagged_and_redacted(check: str, text: str, after: str):
    assert check in flags(text)
    assert redacted(BUILT_IN, text, {check: Action.REDACT}) == after


@pytest.mark.parametrize("text", NOT_FOUND)
def test_what_only_looks_alike_is_left_alone(text: str):
    assert flags(text) == set()


def test_every_check_without_an_off_loop_or_a_size_has_a_pattern():
    others = {"size", "token_ids", "blocklist"} | {name for name, rule in CHECKS.items() if rule.off_loop}
    assert {pattern.name for pattern in built_in()} == CHECKS.keys() - others


BLOCKED = {"blocklist": Action.REDACT}


@pytest.mark.parametrize(
    ("terms", "text", "after"),
    [
        (["bad word"], "a BAD\n  word.", "a [REDACTED]."),
        (["bad"], "badly bad bade", "badly [REDACTED] bade"),
        (["bad", "bad egg"], "bad egg", "[REDACTED]"),
        (["bad"], "b\u200bａ\u00add", "[REDACTED]"),
        (["naïve"], "NAI\u0308VE!", "[REDACTED]!"),
        (["秘密"], "这是秘密文件", "这是[REDACTED]文件"),
        (["bad", "秘密"], "秘密 bad", "[REDACTED] [REDACTED]"),
        (["c++", "a.b"], "use C++, not aXb", "use [REDACTED], not aXb"),
        (["bad"], "bad bad bad", "[REDACTED] [REDACTED] [REDACTED]"),
    ],
)
def test_blocklists(terms: list[str], text: str, after: str):
    pattern = blocklist(terms)
    assert pattern is not None
    assert redacted(Scanner([pattern]), text, BLOCKED) == after


def test_the_longest_blocklist_finds_each_of_its_words():
    terms = [f"word{number:04}x" for number in range(2_000)]
    pattern = blocklist(terms)
    assert pattern is not None
    scanner = Scanner([pattern])
    texts = [f"a {term} b" for term in terms]
    assert {hit.index for hit in scanner.scan(Reading(texts), {"blocklist": Action.BLOCK})} == set(range(2_000))
    assert scanner.scan(Reading([text.replace("x", "y") for text in texts]), {"blocklist": Action.BLOCK}) == []


def test_no_words_no_blocklist():
    assert blocklist([]) is None
    assert blocklist(["\u200b"]) is None


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("(", "missing"),
        ("(?=x)", "RE2"),
        ("x*", "empty"),
        ("^$", "empty"),
        (r"\Ax", "ends of a line"),
        (r"x\\\z", "ends of a line"),
    ],
)
def test_a_pattern_that_cannot_be_used_says_why(expression: str, word: str):
    with pytest.raises(BadPattern, match=word):
        custom("mine", expression)


def test_a_pattern_holds_in_every_text_and_line():
    scanner = Scanner([custom("mine", "^secret$")])
    hits = scanner.scan(Reading(["first", "secret", "a\nsecret\nb", "a secret"]), {"mine": Action.FLAG})
    assert [hit.index for hit in hits] == [1, 2]
    assert Scanner([custom("mine", r"a\\A")]).scan(Reading([r"a\A"]), {"mine": Action.FLAG}) != []


def test_a_phrase_does_not_reach_from_one_text_into_the_next():
    pattern = blocklist(["bad word"])
    assert pattern is not None
    assert Scanner([pattern]).scan(Reading(["so bad", "word"]), {"blocklist": Action.BLOCK}) == []


SECRETS = st.sampled_from(
    ["ann@example.org", "4111 1111 1111 1111", "DE89370400440532013000", "8.8.8.8", "sk-abcdefghijklmnopqrstuvwx"]
)
# Text that can't become part of a find beside it.
AROUND = st.text(st.characters(categories=["Lu", "Ll", "Lo", "So"]), max_size=20).map(lambda t: f" {t} ")


@given(st.lists(st.tuples(AROUND, SECRETS), min_size=1, max_size=5), AROUND)
@settings(max_examples=150, deadline=None)
def test_redaction_takes_the_find_and_nothing_else(parts: list[tuple[str, str]], end: str):
    text = "".join(around + secret for around, secret in parts) + end
    after = redacted(BUILT_IN, text)
    assert all(secret not in after for _, secret in parts)
    rest = after
    for around, _ in parts:
        assert rest.startswith(around)
        rest = rest.removeprefix(around)
        assert rest.startswith("[")
        rest = rest[rest.index("]") + 1 :]
    assert rest == end


@given(st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_origins_lead_back_to_the_text(text: str):
    folded, origins = fold_with_origins(text)
    assert len(origins) == len(folded) + 1
    assert origins == sorted(origins)
    assert origins[-1] == len(text)
    assert fold(folded) == fold(text)


@given(st.text(st.characters(categories=["Cs", "L", "N", "Cc", "Cf"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_can_be_read(text: str):
    BUILT_IN.scan(Reading([text, text]), FLAG_ALL)
    redacted(BUILT_IN, text)
