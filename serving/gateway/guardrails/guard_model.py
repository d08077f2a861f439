"""A guard model in a pool of our own: it reads a text and answers `safe`, or `unsafe` and which categories.

The form is Llama Guard's (`unsafe`, then `S1,S10` on the next line); the categories are the MLCommons hazards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from serving.core.errors import ServingError
from serving.gateway.guardrails.off_loop import CheckFailed, Found

Ask = Callable[[str], Awaitable[str]]
"""Sends a text to the guard model as a user's message and returns what it said."""

MAX_ASKED_CHARS = 8_000
"""A longer text is judged in pieces: a guard model's context is finite."""
CATEGORIES = {
    "S1": "violent_crimes",
    "S2": "non_violent_crimes",
    "S3": "sex_crimes",
    "S4": "child_exploitation",
    "S5": "defamation",
    "S6": "specialized_advice",
    "S7": "privacy",
    "S8": "intellectual_property",
    "S9": "indiscriminate_weapons",
    "S10": "hate",
    "S11": "self_harm",
    "S12": "sexual_content",
    "S13": "elections",
    "S14": "code_interpreter_abuse",
}
OTHER = "unsafe"
"""The category of an `unsafe` without one that we know."""


class GuardModelCheck:
    """Asks the model about all texts of a request together: what is harmless in parts may not be as a whole."""

    name = "guard_model"
    threshold = 0.5

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def find(self, texts: Sequence[str]) -> Sequence[Found]:
        """What it holds for unsafe, as found in the first text. Raises CheckFailed when it gives no verdict."""
        joined = "\n\n".join(text for text in texts if text.strip())
        for start in range(0, len(joined), MAX_ASKED_CHARS):
            try:
                answer = await self._ask(joined[start : start + MAX_ASKED_CHARS])
            except ServingError as error:
                raise CheckFailed("error", f"the guard model did not answer: {error.code}") from error
            if categories := parse(answer):
                return [Found(0, 1.0, category) for category in categories]
        return []

    async def close(self) -> None:
        """It started nothing."""


def parse(answer: str) -> list[str]:
    """The categories of an answer; empty when it says `safe`.

    Raises:
        CheckFailed: it says neither.
    """
    lines = answer.strip().lower().splitlines()
    verdict = lines[0].strip(" .") if lines else ""
    if verdict == "safe":
        return []
    if verdict != "unsafe":
        raise CheckFailed("no_verdict", "the guard model's answer begins with neither safe nor unsafe")
    codes = [code.strip().upper() for code in (lines[1] if len(lines) > 1 else "").split(",")]
    return [CATEGORIES[code] for code in codes if code in CATEGORIES] or [OTHER]
