"""Prompts of the user's own: a JSONL file, lines of text, or a data set.

A line of JSONL is one of

    {"messages": [{"role": "user", "content": "…"}], "max_tokens": 64, "tools": […]}     a chat in OpenAI's form
    {"prompt": "…", "max_tokens": 64}                                                    a completion
    {"input": "…"}                                                                       an embedding
    {"custom_id": "…", "url": "…", "body": {…one of these…}}                             a line of an OpenAI batch

`session_id` makes lines turns of one session, `service_tier` asks for a tier; `model` and `stream` are left out, for
the run sets them. A file that ends in .txt has a prompt a line. Lengths are estimates until the server tells them.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from serving.core.state import Task
from workbench.loadgen.chat_frame import ChatFrame, FrameNeed
from workbench.loadgen.json_lines import object_of
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.specs import nearest
from workbench.loadgen.vocabulary import Vocabulary, WorkloadError

BYTES_A_TOKEN = 4  # of English, where no tokenizer is at hand
_SET_BY_THE_RUN = ("model", "stream", "stream_options", "custom_id", "service_tier", "session_id", "user")
_PASSED_ON = (
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "seed", "logit_bias"),
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("dimensions", "encoding_format", "chat_template_kwargs"),
)
_LENGTHS = ("max_tokens", "max_completion_tokens", "output_tokens")
_CONTENTS = ("messages", "prompt", "input")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the user's, checked; `where` is file and line."""

    where: str
    kind: str
    content: Any
    num_output_tokens: int | None
    extra: Mapping[str, Any]
    tier: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class UserWorkload:
    """The user's rows in their order.

    Attributes:
        rows: all of one task.
        num_output_tokens: where a row does not say.
        repeats: begin again when they end; the server then answers from its cache.
        may_stop: answers may end by themselves, as they would in use; otherwise the server is told to go on.
    """

    rows: tuple[Row, ...]
    num_output_tokens: int = 128
    repeats: bool = False
    may_stop: bool = True

    def __post_init__(self) -> None:
        if not self.rows:
            raise WorkloadError("the file holds no prompt")
        kinds = Counter(row.kind == "input" for row in self.rows)
        if len(kinds) > 1:
            raise WorkloadError("the file mixes embeddings with prompts: a run has one task; split it")

    @property
    def task(self) -> Task:
        """Embed when the rows are inputs to embed."""
        return Task.EMBED if self.rows[0].kind == "input" else Task.GENERATE

    @property
    def num_repeated(self) -> int:
        """Rows whose content an earlier row has."""
        return len(self.rows) - len({repr(row.content) for row in self.rows})

    @property
    def frame_need(self) -> FrameNeed | None:
        """Nothing is asked: the server's usage tells each prompt's length."""
        return None

    def prompts(self, vocabulary: Vocabulary | None, *, seed: int, frame: ChatFrame | None = None) -> Iterator[Prompt]:
        """One prompt a row; without end when they repeat."""
        made = (self._prompt(row, vocabulary) for row in (cycle(self.rows) if self.repeats else self.rows))
        turns: Counter[str] = Counter()
        for number, prompt in enumerate(made):
            if prompt.session_id is None:
                yield prompt
                continue
            session_id = f"{prompt.session_id}-{number // len(self.rows)}"
            yield replace(prompt, session_id=session_id, turn=turns[session_id])
            turns[session_id] += 1

    def _prompt(self, row: Row, vocabulary: Vocabulary | None) -> Prompt:
        is_chat = row.kind == "messages"
        text = "\n".join(_texts(row.content)) if is_chat else row.content
        if vocabulary is not None and isinstance(text, str):
            length = len(vocabulary.tokenizer.encode(text).ids)
        else:
            length = len(text.encode()) // BYTES_A_TOKEN if isinstance(text, str) else len(text)
        asked = 0 if row.kind == "input" else row.num_output_tokens or self.num_output_tokens
        own: dict[str, Any] = {"is_estimated": True, "may_stop": self.may_stop, "extra": row.extra}
        own |= {"tier": row.tier, "session_id": row.session_id}
        if is_chat:
            own["messages"] = tuple(row.content)
        elif isinstance(text, str):
            own["text"] = text
        else:
            own["token_ids"] = tuple(text)
        return Prompt(max(1, length), asked, **own)


def _texts(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") or ""
        yield content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def read_rows(path: Path, limit: int | None = None) -> tuple[Row, ...]:
    """The rows of a .jsonl or .txt file, the first `limit` of them.

    Raises:
        WorkloadError: there is no such file, or a line is not as promised; the message names it.
    """
    if not path.is_file():
        raise WorkloadError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            lines = ((f"{path}:{number}", line.strip()) for number, line in enumerate(file, start=1))
            full = islice(((where, line) for where, line in lines if line), limit)
            if path.suffix == ".txt":
                return tuple(Row(where, "prompt", line.decode("utf-8"), None, {}) for where, line in full)
            return tuple(check_row(where, _json(where, line)) for where, line in full)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error


def read_dataset(
    source: str, *, split: str = "train", columns: Mapping[str, str] | None = None, limit: int | None = None
) -> tuple[Row, ...]:
    """The rows of a data set: a local .jsonl, .json, .csv or .parquet file, a folder that `save_to_disk` wrote, or a
    name on the hub where there is one.

    Args:
        source: path or name.
        split: of a data set that has several.
        columns: which columns are `messages`, `prompt`, `input` or `max_tokens`; those of these names otherwise.
        limit: rows at most.

    Raises:
        WorkloadError: it cannot be loaded, lacks a column, or a row is not as promised.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-datasets-") as cache:
        data = _load(source, split, cache)
        names = dict(columns or {})
        missing = [name for name in names.values() if name not in data.column_names]
        if missing:
            raise WorkloadError(
                f"{source} has no column {missing[0]}{nearest(missing[0], data.column_names, of='It has')}"
            )
        wanted = names or {name: name for name in data.column_names if name in (*_CONTENTS, *_LENGTHS)}
        if not set(wanted) & set(_CONTENTS):
            raise WorkloadError(
                f"{source} has none of the columns {', '.join(_CONTENTS)}; say which one is, as in prompt=COLUMN. "
                f"It has: {', '.join(data.column_names)}"
            )
        rows = ({own: row[column] for own, column in wanted.items()} for row in islice(data, limit))
        return tuple(check_row(f"{source}, row {number}", row) for number, row in enumerate(rows))


def _load(source: str, split: str, cache: str) -> Any:
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import datasets  # seconds to import, and needed here alone

    path = Path(source)
    kinds = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    try:
        if path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
            data = datasets.load_from_disk(str(path))
            return data[split] if isinstance(data, datasets.DatasetDict) else data
        if path.is_file():
            kind = kinds.get(path.suffix)
            if kind is None:
                raise WorkloadError(f"{source}: a data set is a {', '.join(kinds)} file or a folder, not {path.suffix}")
            return datasets.load_dataset(
                kind, data_files=str(path), split="train", cache_dir=cache, keep_in_memory=True
            )
        return datasets.load_dataset(source, split=split, cache_dir=cache, keep_in_memory=True)
    except WorkloadError:
        raise
    except Exception as error:  # datasets raises what its readers and the network raise
        raise WorkloadError(f"the data set {source} cannot be loaded: {type(error).__name__}: {error}") from error


def check_row(where: str, row: Mapping[str, Any]) -> Row:
    """The row, if it can be sent.

    Raises:
        WorkloadError: it cannot; the message says which field and why.
    """
    body = row.get("body")
    if isinstance(body, Mapping):
        row = body
    kinds = [name for name in _CONTENTS if row.get(name) is not None]
    if len(kinds) != 1:
        found = f"both {kinds[0]} and {kinds[1]}" if kinds else "neither messages, prompt nor input"
        raise WorkloadError(f"{where}: it has {found}; one of them is what is sent")
    if row.get("n") not in (None, 1):
        raise WorkloadError(f"{where}: n is {row['n']!r}; one answer a request is measured")
    known = (*_CONTENTS, *_LENGTHS, *_PASSED_ON, *_SET_BY_THE_RUN, "n")
    unknown = next((name for name in row if name not in known), None)
    if unknown is not None:
        raise WorkloadError(f"{where}: {unknown} is unknown{nearest(unknown, known, of='Known are')}")
    return Row(
        where,
        kinds[0],
        _content(where, kinds[0], row[kinds[0]]),
        _length(where, row),
        {name: row[name] for name in _PASSED_ON if row.get(name) is not None},
        _text_or_none(where, row, "service_tier"),
        _text_or_none(where, row, "session_id"),
    )


def _content(where: str, kind: str, value: Any) -> Any:
    if kind == "messages":
        is_list = isinstance(value, list) and value
        if not is_list or not all(isinstance(message, Mapping) and message.get("role") for message in value):
            raise WorkloadError(f"{where}: messages must be a list of objects with a role and a content")
        # A data set has all fields in all rows, and null where there is nothing.
        return [{name: part for name, part in message.items() if part is not None} for message in value]
    is_ids = isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    if not is_ids and not (isinstance(value, str) and value):
        raise WorkloadError(f"{where}: {kind} must be a text that is not empty, or a list of token ids")
    return value


def _length(where: str, row: Mapping[str, Any]) -> int | None:
    for name in _LENGTHS:
        value = row.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WorkloadError(f"{where}: {name} is {value!r}; it must be a whole number of at least 1")
            return value
    return None


def _text_or_none(where: str, row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    is_text = isinstance(value, str) and 0 < len(value) <= 200 and value.isascii() and value.isprintable()
    if value is not None and not is_text:
        raise WorkloadError(f"{where}: {name} is {value!r}; it must be a text of 1 to 200 printable ASCII characters")
    return value


def _json(where: str, line: bytes) -> Mapping[str, Any]:
    try:
        return object_of(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: {error}") from None
