"""Turns of agents, as LMCache publishes them: characters and what a prompt shares with the turn before, no text.

    agent,session,turn,t_rel_s,input_chars,output_chars,common_prefix_chars_with_prev_turn

Times are of each session's own start: all sessions begin together, and an arrival of one's own spreads them. Tokens
are characters over 4, English's usual share. A turn has the blocks of the turn before it as far as their prompts
are equal, then blocks of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from workbench.loadgen.traces import TracedRequest, TraceError

CHARS_A_TOKEN = 4
BLOCK_TOKENS = 16
FIELDS = ("session", "turn", "t_rel_s", "input_chars", "output_chars", "common_prefix_chars_with_prev_turn")


def agent_requests(rows: Iterable[tuple[str, Mapping[str, str]]], skipped: Counter[str]) -> list[TracedRequest]:
    """The turns as requests.

    Args:
        rows: where each stands, for errors, and its fields.
        skipped: counts the turns that are no request.

    Raises:
        TraceError: a field is no number.
    """
    requests: list[TracedRequest] = []
    last: dict[str, tuple[str, ...]] = {}
    for where, row in rows:
        session, turn = row["session"], row["turn"]
        input_chars, output_chars, common_chars = (_number(where, name, row[name]) for name in FIELDS[3:])
        if input_chars < 1 or output_chars < 1:
            skipped["turns without a prompt or an answer"] += 1
            continue
        num_prompt_tokens = max(1, round(input_chars / CHARS_A_TOKEN))
        num_blocks = num_prompt_tokens // BLOCK_TOKENS
        num_common = min(int(common_chars / CHARS_A_TOKEN) // BLOCK_TOKENS, num_blocks)
        common = last.get(session, ())[:num_common]
        own = tuple(f"{session}#{turn}#{number}" for number in range(len(common), num_blocks))
        last[session] = common + own
        at_s = _number(where, "t_rel_s", row["t_rel_s"])
        num_output_tokens = max(1, round(output_chars / CHARS_A_TOKEN))
        requests.append(TracedRequest(at_s, num_prompt_tokens, num_output_tokens, last[session]))
    return requests


def _number(where: str, field: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not abs(number) < 1e12 or (number < 0 and field != "t_rel_s"):
        raise TraceError(f"{where}: {field} is {text!r}; it must be a number" + ", 0 or more" * (field != "t_rel_s"))
    return number
