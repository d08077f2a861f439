"""The checks that run in processes of their own: the packaged models, and children that are late or die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from serving.gateway.guardrails.off_loop import CheckFailed, ProcessCheck, is_installed
from serving.gateway.guardrails.worker import pieces_of
from tests.integration.processes import until

# A worker that does what the text says: sleeps, dies, echoes, or fails.
ACTOR = """
import json, os, sys, time
from pathlib import Path
Path(sys.argv[1]).open("a").write(f"{os.getpid()}\\n")
def write(answer):
    data = json.dumps(answer).encode()
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()
time.sleep(float(sys.argv[2]))
write({"error": "ImportError"} if sys.argv[3:] else {})
while head := sys.stdin.buffer.read(4):
    text = json.loads(sys.stdin.buffer.read(int.from_bytes(head, "big")))["texts"][0]
    if text == "sleep":
        time.sleep(600)
    if text.startswith("slow"):
        time.sleep(0.1)
    if text == "die":
        os._exit(1)
    write({"error": "ValueError"} if text == "fail" else {"found": [[0, 0.5, text, [[0, 1]]]]})
"""
Make = Callable[..., ProcessCheck]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes checks whose children write their pids to `pids`; none of those lives on."""
    (tmp_path / "actor.py").write_text(ACTOR)
    checks: list[ProcessCheck] = []

    def build(num_workers: int = 1, loads_s: float = 0.0, *flags: str) -> ProcessCheck:
        command = [sys.executable, str(tmp_path / "actor.py"), str(tmp_path / "pids"), str(loads_s), *flags]
        checks.append(ProcessCheck("toxicity", 0.5, num_workers, command=command))
        return checks[-1]

    yield build
    for check in checks:
        await check.close()
    assert [pid for pid in pids(tmp_path) if psutil.pid_exists(pid)] == []


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@asynccontextmanager
async def closed(check: ProcessCheck) -> AsyncIterator[ProcessCheck]:
    yield check
    await check.close()


async def says(check: ProcessCheck, text: str, limit_s: float = 10.0) -> str:
    async with asyncio.timeout(limit_s):
        (found,) = await check.find([text])
    return found.category


async def test_a_child_is_started_once_and_asked_again(make: Make, tmp_path: Path) -> None:
    check = make()
    assert [await says(check, text) for text in ("a", "b", "ü\ud800")] == ["a", "b", "ü?"]
    assert len(pids(tmp_path)) == 1


async def test_children_work_side_by_side_and_others_wait(make: Make, tmp_path: Path) -> None:
    check = make(2)
    texts = [f"slow {number}" for number in range(12)]
    assert await asyncio.gather(*(says(check, text) for text in texts)) == texts
    assert len(pids(tmp_path)) == 2


async def test_one_that_is_late_is_killed_and_another_answers(make: Make, tmp_path: Path) -> None:
    check = make()
    await says(check, "a")
    with pytest.raises(TimeoutError):
        await says(check, "sleep", limit_s=0.1)
    assert await says(check, "b") == "b"
    first, second = pids(tmp_path)
    assert not psutil.pid_exists(first)
    assert psutil.pid_exists(second)


async def test_one_that_dies_fails_its_request_alone(make: Make, tmp_path: Path) -> None:
    check = make()
    with pytest.raises(CheckFailed) as caught:
        await says(check, "die")
    assert caught.value.cause == "process_died"
    assert await says(check, "a") == "a"


async def test_one_that_was_killed_while_it_waited_fails_nobody(make: Make, tmp_path: Path) -> None:
    check = make()
    await says(check, "a")
    (pid,) = pids(tmp_path)
    os.kill(pid, signal.SIGKILL)

    async def is_gone() -> bool:
        return not psutil.pid_exists(pid)

    await until(is_gone, "the child to be gone")
    await asyncio.sleep(0.1)  # until the loop was told
    assert await says(check, "b") == "b"


async def test_a_failure_is_told_by_its_kind_and_the_child_stays(make: Make, tmp_path: Path) -> None:
    check = make()
    with pytest.raises(CheckFailed, match="failed: ValueError"):
        await says(check, "fail")
    assert await says(check, "a") == "a"
    assert len(pids(tmp_path)) == 1


async def test_loading_longer_than_a_request_waits_kills_nothing(make: Make, tmp_path: Path) -> None:
    check = make(1, 0.5)
    for _ in range(2):
        with suppress(TimeoutError):
            await says(check, "a", limit_s=0.05)
    assert await says(check, "b") == "b"
    assert len(pids(tmp_path)) == 1


async def test_one_that_cannot_load_says_so_and_is_tried_again(make: Make, tmp_path: Path) -> None:
    check = make(1, 0.0, "broken")
    for _ in range(2):
        with pytest.raises(CheckFailed, match="did not start: ImportError") as caught:
            await says(check, "a")
        assert caught.value.cause == "not_started"
    assert len(pids(tmp_path)) == 2


async def test_the_packaged_toxicity_model() -> None:
    assert is_installed("toxicity")
    async with closed(ProcessCheck("toxicity", 0.8)) as check:
        texts = [
            "What a lovely day by the river.",
            "you stupid fucking idiot",
            "",
            "kind words " * 500 + " fucking idiot",
        ]
        found = {found.index: found.score for found in await check.find(texts)}
    assert found.keys() == {0, 1, 3}
    assert found[0] < 0.2 < 0.8 < min(found[1], found[3])


@pytest.mark.skipif(not is_installed("presidio"), reason="presidio-analyzer is not installed (extra guardrails)")
async def test_presidio_works_without_a_model_of_spacy() -> None:
    async with closed(ProcessCheck("presidio", 0.4, entities=[])) as check:
        found = await check.find(["mail bob@example.com or call 212-555-1234", "nothing"])
    assert ("email_address", ((5, 20),)) in [(f.category, f.spans) for f in found]
    assert {f.index for f in found} == {0}


@pytest.mark.parametrize("text", ["", "short", "a" * 2_000, "word " * 1_000, " " * 900])
def test_pieces_are_the_whole_text(text: str) -> None:
    pieces = list(pieces_of(text))
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(len(piece) <= 100 for piece in pieces)
