"""The texts of a request's body, wherever they stand, and the way back for those that a check rewrote.

Everything that can reach a model's prompt is collected: prompts, inputs, messages in all their parts, the arguments
and results of tool calls, the descriptions and parameters of tools. What names things (roles, types, ids) or holds
media is not text. Token ids are counted: no check can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Fields of a body whose strings reach the prompt, at OpenAI's endpoints and our own.
TEXT_FIELDS = (
    "messages",
    "prompt",
    "input",
    "text",
    "suffix",
    "instructions",
    "tools",
    "functions",
    "documents",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
)
# Fields whose objects are messages and their parts.
_OF_PARTS = frozenset({"messages", "input"})
# Keys of a message under which a short string is a name or an id, and those that hold a medium.
_NAMES = frozenset({"role", "type", "id", "tool_call_id", "detail"})
_MEDIA = frozenset({"image_url", "input_audio", "audio_url", "video_url", "file"})
MAX_NAME_CHARS = 64
# The keys of what stands under these are the client's own words, and a template shows them to the model.
_OWN_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions"})

Key = str | int


@dataclass(slots=True)
class Texts:
    """A body's texts in their order. `holders` are where each stands: None for the name of a field of the client's.

    `fields` names the body's field of each; `num_token_ids` counts the tokens that came as numbers.
    """

    values: list[str] = field(default_factory=list)
    holders: list[tuple[Any, Key] | None] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    num_token_ids: int = 0

    @property
    def num_chars(self) -> int:
        """Characters of all texts."""
        return sum(map(len, self.values))

    def add(self, name: str, text: str, holder: tuple[Any, Key] | None) -> None:
        """Takes a text."""
        self.values.append(text)
        self.holders.append(holder)
        self.fields.append(name)

    def can_rewrite(self, index: int) -> bool:
        """Whether the text can be replaced: a key of an object can't without breaking what refers to it."""
        return self.holders[index] is not None

    def rewrite(self, values: Sequence[str]) -> None:
        """Puts `values`, as many and in the same order, where the texts stood. Those that are equal stay untouched.

        Raises:
            ValueError: another number of texts, or a new text for a place that can't be rewritten.
        """
        for old, new, holder in zip(self.values, values, self.holders, strict=True):
            if old is new or old == new:
                continue
            if holder is None:
                raise ValueError("the name of a field cannot be rewritten")
            container, key = holder
            container[key] = new
        self.values = list(values)


def collect(body: dict[str, Any]) -> Texts:
    """The texts of a parsed body, whatever the endpoint. Fields of a wrong type are left for others to refuse."""
    found = Texts()
    for name in TEXT_FIELDS:
        if name not in body or (value := body[name]) is None:
            continue
        if isinstance(value, str):
            found.add(name, value, (body, name))
        elif name == "messages":
            _collect_messages(value, found)
        else:
            _walk(value, name, found)
    return found


def _collect_messages(messages: Any, found: Texts) -> None:
    if not isinstance(messages, list):
        _walk(messages, "messages", found)
        return
    for message in messages:
        if _is_plain(message):
            found.add("messages", message["content"], (message, "content"))
        else:
            _walk(message, "messages", found)


def _is_plain(message: Any) -> bool:
    """Whether it has the common shape, a role and one text, which needs no walk."""
    if not isinstance(message, dict) or len(message) != 2:
        return False
    role = message.get("role")
    return isinstance(message.get("content"), str) and isinstance(role, str) and len(role) <= MAX_NAME_CHARS


def _walk(value: Any, name: str, found: Texts) -> None:
    """All strings in `value` in their order; without recursion, for a client chooses the depth."""
    pending: list[tuple[Any, tuple[Any, Key] | None]] = [(value, None)]
    while pending:
        item, holder = pending.pop()
        if isinstance(item, str):
            found.add(name, item, holder)
        elif isinstance(item, dict):
            has_own_keys = holder is not None and holder[1] in _OWN_KEYS
            for key in reversed(item):
                if name not in _OF_PARTS or not _is_no_text(key, item[key]):
                    pending.append((item[key], (item, key)))
                if has_own_keys:
                    pending.append((key, None))
        elif isinstance(item, list) and item and type(item[0]) is int:
            found.num_token_ids += len(item)
        elif isinstance(item, list):
            pending += [(item[index], (item, index)) for index in range(len(item) - 1, -1, -1)]


def _is_no_text(key: str, value: Any) -> bool:
    return key in _MEDIA or (key in _NAMES and isinstance(value, str) and len(value) <= MAX_NAME_CHARS)
