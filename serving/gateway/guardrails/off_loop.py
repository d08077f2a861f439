"""Checks that take milliseconds or more: what they promise, and the child processes that run two of them.

A model in Python holds the interpreter while it computes, so it runs in a process of its own and never beside the
event loop. A child does one request's texts at a time; one that is late is killed and another started, so that a text
made to cost can't hold a place for long. Loading a model takes seconds: a child is handed out when it is ready, and
no request's time limit ends one that still loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

PACKAGES: Mapping[str, str] = {"toxicity": "profanity_check", "presidio": "presidio_analyzer"}
START_TIMEOUT_S = 60.0


class CheckFailed(Exception):
    """A check could not be made; `cause` is a word for the metric. The message never holds a text."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Found:
    """What a check off the loop makes of the text of that index.

    `score` is from 0 to 1; `category` is the check's own word; `spans` are places in characters, if it names any.
    """

    index: int
    score: float
    category: str = ""
    spans: tuple[tuple[int, int], ...] = ()


class OffLoopCheck(Protocol):
    """A check that the event loop awaits. Anything that keeps this can be plugged in."""

    @property
    def name(self) -> str:
        """The check's name in policies and metrics."""
        ...

    @property
    def threshold(self) -> float:
        """The score from which something counts as found."""
        ...

    async def find(self, texts: Sequence[str]) -> Sequence[Found]:
        """What it makes of each text, whatever the score. Cancelled when it is late. Raises CheckFailed."""
        ...

    async def close(self) -> None:
        """Ends what it started."""
        ...


def is_installed(check: str) -> bool:
    """Whether the package behind a check of `PACKAGES` is there."""
    return importlib.util.find_spec(PACKAGES[check]) is not None


class ProcessCheck:
    """A check of worker.py in `num_workers` child processes, started when first needed."""

    def __init__(
        self, name: str, threshold: float, num_workers: int = 1, *, command: Sequence[str] = (), **parameters: Any
    ) -> None:
        """`parameters` go to the check in the child; `command` is run in place of worker.py."""
        self.name = name
        self.threshold = threshold
        self._command = command or (sys.executable, "-m", "serving.gateway.guardrails.worker", name)
        self._parameters = parameters
        self._num_workers = num_workers
        self._ready: asyncio.Queue[_Child | CheckFailed] = asyncio.Queue()
        self._children: set[_Child] = set()
        self._num_children = 0  # with those that still load
        self._starts: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Starts the children that are missing; `find` does it too."""
        while not self._closed and self._num_children < self._num_workers:
            self._num_children += 1
            task = asyncio.get_running_loop().create_task(self._start())
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    async def find(self, texts: Sequence[str]) -> Sequence[Found]:
        """Waits for a child and has it look. Raises CheckFailed when there is none or it fails."""
        child = await self._take()
        try:
            answer = await child.ask({"texts": [_encodable(text) for text in texts], **self._parameters})
        except BaseException:  # late, cancelled, broken: what it would say next belongs to this request
            await self._drop(child)
            self.start()
            raise
        self._ready.put_nowait(child)
        if "error" in answer:
            raise CheckFailed("error", f"the check {self.name} failed: {answer['error']}")
        return [Found(i, score, category, tuple(map(tuple, spans))) for i, score, category, spans in answer["found"]]

    async def _start(self) -> None:
        """Puts a child in the queue when it has loaded its model, or why there is none."""
        child = None
        try:
            child = _Child(self.name, await _spawn(self._command))
            async with asyncio.timeout(START_TIMEOUT_S):
                greeting = await child.receive()
            if "error" in greeting:
                raise CheckFailed("not_started", greeting["error"])
            self._children.add(child)
            self._ready.put_nowait(child)
        except BaseException as error:
            self._num_children -= 1
            if child is not None:
                await child.end()
            if not isinstance(error, CheckFailed | OSError | TimeoutError):
                raise
            why = error if isinstance(error, CheckFailed) else type(error).__name__
            self._ready.put_nowait(CheckFailed("not_started", f"the check {self.name} did not start: {why}"))

    async def _take(self) -> _Child:
        """A child to oneself. Raises CheckFailed when none could be started."""
        while True:
            self.start()
            child = await self._ready.get()
            if isinstance(child, CheckFailed):
                raise child
            if child.is_alive:
                return child
            await self._drop(child)

    async def _drop(self, child: _Child) -> None:
        self._children.discard(child)
        self._num_children -= 1
        await child.end()

    async def close(self) -> None:
        """Ends the children."""
        self._closed = True
        for task in tuple(self._starts):
            task.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        while self._children:
            await self._children.pop().end()


class _Child:
    """A process of worker.py: messages with their length before them, one answer to each."""

    def __init__(self, check: str, process: asyncio.subprocess.Process) -> None:
        self._check = check
        self._process = process

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        data = orjson.dumps(request)
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(4, "big") + data)
        return await self.receive()

    async def receive(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            size = int.from_bytes(await stdout.readexactly(4), "big")
            answer: dict[str, Any] = orjson.loads(await stdout.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CheckFailed("process_died", f"the process of the check {self._check} died") from error
        return answer

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        # Shielded: whoever is cancelled while it cleans up leaves no child behind all the same.
        await asyncio.shield(self._process.wait())


async def _spawn(command: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # a library's warning or traceback may quote what it was given
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
