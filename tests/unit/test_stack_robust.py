"""What the stack's supervision survives: full disks, listeners that fail, workers that outlive their leader."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from workbench import wiring
from workbench.cli import status
from workbench.config import RESERVED, WorkbenchConfig, load_config
from workbench.config_layers import ConfigError
from workbench.stack.parts import kept_secret
from workbench.stack.service import Service, ServiceFailed, keep_alive
from workbench.stack.state import ProcessRecord, StackState, StateFile, end_sessions
from workbench.stack.supervisor import Stack
from workbench.wiring import NotRunning

LEADER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def own_record(name: str = "supervisor") -> ProcessRecord:
    record = ProcessRecord.of(name, os.getpid())
    assert record is not None
    return record


class Disk:
    """Full or not, as the state file finds it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        write_text = Path.write_text

        def write(path: Path, text: str, *more: str) -> int:
            if not self.is_full:
                return write_text(path, text, *more)
            write_text(path, text[:3])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_text", write)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def configuration(folder: Path, pool_id: str = "main") -> WorkbenchConfig:
    pool = {"model": "tiny", "hardware": "cpu", "launcher": "fake", "id": pool_id}
    text = yaml.safe_dump({"models": {"tiny": {"source": str(folder)}}, "pools": [pool], "gateway": {"port": 1}})
    (folder / "workbench.yaml").write_bytes(text.encode())
    return load_config(folder / "workbench.yaml")


def test_a_full_disk_leaves_the_state_file_as_it_was(tmp_path: Path, disk: Disk):
    file, state = StateFile(tmp_path / "stack.json"), StackState(own_record())
    file.write(state)
    disk.is_full = True
    with pytest.raises(OSError, match="No space"):
        file.write(StackState(own_record(), urls={"store": "unix:///s"}))
    assert file.read() == state
    assert list(tmp_path.iterdir()) == [file.path]


def test_a_full_disk_is_said_once_and_the_state_is_written_later(tmp_path: Path, disk: Disk):
    said: list[str] = []
    stack = Stack(configuration(tmp_path), lambda part, what: said.append(f"{part}: {what}"))
    disk.is_full = True
    stack._save()
    stack._save()
    assert len(said) == 1
    assert str(stack.layout.state_file.path) in said[0]
    assert "No space" in said[0]
    disk.is_full = False
    stack._save()
    assert stack.layout.state_file.read() is not None


@pytest.mark.parametrize("text", ["{", "", '{"supervisor": null}'])
def test_a_broken_state_file_is_written_again(tmp_path: Path, text: str):
    stack = Stack(configuration(tmp_path), lambda part, what: None)
    stack._save()
    file = stack.layout.state_file
    state = file.read()
    file.path.write_bytes(text.encode())
    stack._save()
    assert file.read() == state
    file.remove()
    stack._save()
    assert file.read() == state


async def test_up_on_a_full_disk_says_where(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workbench.stack.supervisor.check_port", lambda *_: None)
    stack = Stack(configuration(tmp_path), lambda part, what: None)
    disk.is_full = True
    with pytest.raises(ServiceFailed, match=rf"{stack.layout.data_dir}.*No space"):
        await stack.start()
    assert not stack.layout.metrics_dir.exists()
    assert not stack._lock.is_held


@pytest.mark.parametrize(
    "field", [{"pid": -1}, {"pid": "1"}, {"pid": True}, {"start_ticks": None}, {"boot_id": None}, {"name": 3}]
)
def test_a_record_of_wrong_types_is_nobody(tmp_path: Path, field: dict[str, object]):
    record = {"name": "engine", "pid": os.getpid(), "start_ticks": 1, "command": ""} | field

    (tmp_path / "stack.json").write_text(
        json.dumps({"supervisor": record, "processes": [record], "urls": {}, "pools": {}})
    )
    assert StateFile(tmp_path / "stack.json").read() is None


async def test_supervision_goes_on_when_nobody_can_be_told():
    class Part:
        pid = None
        is_alive = False
        num_starts = 0
        started = asyncio.Event()

        async def start(self) -> None:
            self.num_starts += 1
            if self.num_starts == 2:
                self.started.set()

        async def stop(self) -> None: ...

    def fails(part: str, what: str) -> None:
        raise OSError(errno.EIO, "the terminal is gone")

    part = Part()
    keeper = asyncio.create_task(keep_alive("part", part, fails, poll_s=0, backoff_s=0))
    async with asyncio.timeout(5):
        await part.started.wait()
    assert not keeper.done()
    keeper.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeper


async def test_a_worker_that_outlived_its_leader_ends_before_the_next_start(tmp_path: Path):
    pid_path = tmp_path / "pid"

    async def ready() -> bool:
        return pid_path.exists() and pid_path.read_text() != ""

    service = Service("mlflow", [sys.executable, "-S", "-c", LEADER, str(pid_path)], tmp_path / "log", ready=ready)
    await service.start()
    try:
        assert service.pid is not None
        worker = psutil.Process(int(pid_path.read_text()))
        psutil.Process(service.pid).kill()
        for _ in range(500):
            if not service.is_alive:
                break
            await asyncio.sleep(0.01)
        assert worker.is_running()
        pid_path.unlink()
        await service.start()
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    finally:
        await service.stop()


async def test_what_cannot_be_ended_is_said_and_keeps_no_other_from_its_end(tmp_path: Path):
    said: list[str] = []
    stack = Stack(configuration(tmp_path), lambda part, what: said.append(f"{part}: {what}"))
    ended = asyncio.Event()

    async def fails() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def ends() -> None:
        ended.set()

    await stack._end_all({"main": fails(), "store": ends()})
    assert ended.is_set()
    assert len(said) == 1
    assert said[0].startswith("main: failed to end")


def test_the_state_file_stays_while_anything_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workbench.stack.supervisor.end_sessions", lambda records: [r.name for r in records])
    stack = Stack(configuration(tmp_path), lambda part, what: None)
    stack._save()
    left = own_record("engine")
    stack._forget([left])
    state = stack.layout.state_file.read()
    assert state is not None
    assert state.processes == (left,)
    stack._forget([])
    assert stack.layout.state_file.read() is None


def test_records_of_one_name_are_all_ended():
    stranger = ProcessRecord("gateway-0", os.getpid(), 1, "")
    assert end_sessions([stranger, stranger], timeout_s=0) == []


@pytest.mark.parametrize("pool_id", sorted(RESERVED))
def test_a_pool_cannot_be_called_like_a_part(tmp_path: Path, pool_id: str):
    with pytest.raises(ConfigError, match=f"'{pool_id}' is a part of the stack"):
        configuration(tmp_path, pool_id)


async def test_status_while_the_stack_begins_says_so():
    with pytest.raises(NotRunning, match="begins to start"):
        await status.look(StackState(own_record()))


def test_metrics_lie_in_memory_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = wiring.Layout(tmp_path / "a"), wiring.Layout(tmp_path / "b")
    monkeypatch.setattr(wiring, "SHARED_MEMORY", tmp_path)
    assert first.metrics_dir.parent == tmp_path
    assert first.metrics_dir != second.metrics_dir
    monkeypatch.setattr(wiring, "SHARED_MEMORY", tmp_path / "none")
    assert first.metrics_dir == tmp_path / "a" / "run" / "metrics"


def test_an_empty_secret_of_a_full_disk_is_made_anew(tmp_path: Path):
    path = tmp_path / "secrets" / "cache-salt"
    path.parent.mkdir()
    path.touch()
    secret = kept_secret(path)
    assert len(secret) == 64
    assert kept_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
