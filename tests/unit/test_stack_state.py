"""What counts as ours: a process is ended only by the proof that it is the one written down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from workbench.cli.app import run_app
from workbench.stack.lock import AlreadyRunning, StackLock
from workbench.stack.ports import PortTaken, check_port, free_port
from workbench.stack.state import PoolFacts, ProcessRecord, StackState, StateFile, end_sessions
from workbench.wiring import Layout

SLEEPER = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); time.sleep(60)"


def spawn(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = spawn(SLEEPER)
    yield process
    process.kill()
    process.wait()


def record_of(process: subprocess.Popen[bytes]) -> ProcessRecord:
    record = ProcessRecord.of("sleeper", process.pid)
    assert record is not None
    return record


def test_a_process_is_recognized_until_it_ends(sleeper: subprocess.Popen[bytes]):
    record = record_of(sleeper)
    assert record.is_running
    assert end_sessions([record], timeout_s=5) == ["sleeper"]
    sleeper.wait(5)
    assert not record.is_running
    assert end_sessions([record]) == []


def test_a_pid_that_went_to_somebody_else_is_left_alone(sleeper: subprocess.Popen[bytes]):
    own = record_of(sleeper)
    for stranger in (
        replace(own, start_ticks=own.start_ticks - 1),
        replace(own, boot_id="another boot"),
        replace(own, boot_id=""),
    ):
        assert not stranger.is_running
        assert not stranger.signal(signal.SIGKILL)
        assert end_sessions([stranger], timeout_s=0.1) == []
    assert sleeper.poll() is None


def test_the_session_of_a_leader_of_another_boot_is_nobodys():
    leader = spawn(PARENT)
    record = replace(record_of(leader), boot_id="another boot")
    while not (children := psutil.Process(leader.pid).children()):
        pass
    leader.kill()
    leader.wait()
    try:
        assert record.session() == []
    finally:
        children[0].kill()


def test_a_clock_that_is_set_makes_nobody_a_stranger(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch):
    record = record_of(sleeper)
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + 3600)
    assert record.is_running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workbench.yaml").write_text(
        yaml.safe_dump({"data_dir": str(tmp_path / "data"), "models": {}, "pools": []})
    )
    return tmp_path / "data"


def down(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run_app(["down"])
    return code, " ".join("".join(capsys.readouterr()).split())


def test_down_ends_no_supervisor_that_does_not_hold_the_lock(
    folder: Path, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
):
    StateFile(folder / "run" / "stack.json").write(StackState(record_of(sleeper)))
    code, said = down(capsys)
    assert (code, sleeper.poll()) == (0, None), said
    assert down(capsys)[0] == 3


def test_down_ends_the_supervisor_that_holds_the_lock_and_what_it_left(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    (folder / "run").mkdir(parents=True)
    supervisor = subprocess.Popen(
        [sys.executable, "-S", "-c", hold, str(Layout(folder).lock_path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    engine, other = spawn(SLEEPER), spawn(SLEEPER)
    try:
        assert supervisor.stdout is not None and supervisor.stdout.readline()
        state = StackState(record_of(supervisor), (record_of(engine), replace(record_of(other), start_ticks=1)))
        stranger = replace(record_of(supervisor), boot_id="another boot")
        StateFile(folder / "run" / "stack.json").write(replace(state, supervisor=stranger))
        code, said = down(capsys)
        assert (code, "try again" in said) == (1, True), said
        assert [process.poll() for process in (supervisor, engine, other)] == [None, None, None]

        StateFile(folder / "run" / "stack.json").write(state)
        ending = threading.Thread(target=supervisor.wait)  # as a shell would: a zombie still holds nothing
        ending.start()
        code, said = down(capsys)
        assert code == 0 and "sleeper" in said, said
        ending.join()
        assert supervisor.returncode == -signal.SIGTERM
        assert engine.wait(5) is not None
        assert other.poll() is None
    finally:
        for process in (supervisor, engine, other):
            process.kill()
            process.wait()
        supervisor.stdout.close() if supervisor.stdout else None


def test_children_of_a_dead_leader_are_still_found():
    leader = spawn(PARENT)
    record = record_of(leader)
    while not (children := psutil.Process(leader.pid).children()):
        pass
    leader.kill()
    leader.wait()
    try:
        assert [member.pid for member in record.session()] == [children[0].pid]
        assert end_sessions([record], timeout_s=5) == ["sleeper"]
    finally:
        for child in children:
            if child.is_running():
                child.kill()


def test_the_state_file_holds_all_of_it(tmp_path: Path):
    own = ProcessRecord.of("supervisor", os.getpid(), tmp_path / "log")
    assert own is not None
    facts = PoolFacts("/weights", {"engine": "fake"}, {"device": "cpu"}, {"p-0": [1]})
    state = StackState(own, (own,), {"gateway": "http://127.0.0.1:1"}, {"p": facts})
    file = StateFile(tmp_path / "run" / "stack.json")
    assert file.read() is None
    file.write(state)
    assert file.read() == state
    assert state.is_running
    assert state.leftovers == []
    file.remove()
    assert file.read() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"supervisor": {}}', '{"supervisor": null}'])
def test_a_broken_state_file_names_nobody(tmp_path: Path, text: str):
    (tmp_path / "stack.json").write_text(text)
    assert StateFile(tmp_path / "stack.json").read() is None


def test_one_supervisor_a_folder(tmp_path: Path):
    first, second = StackLock(tmp_path / "run" / "lock"), StackLock(tmp_path / "run" / "lock")
    first.acquire()
    with pytest.raises(AlreadyRunning, match="workbench down"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_taken_port_names_its_holder_and_a_way_out():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken) as error:
            check_port("127.0.0.1", port, "gateway.port")
    message = str(error.value)
    assert f"gateway.port: cannot listen on 127.0.0.1:{port}" in message
    assert f"pid {os.getpid()} holds it" in message
    assert f"WORKBENCH__GATEWAY__PORT={port + 1}" in message


def test_a_free_port_is_free():
    check_port("127.0.0.1", free_port(), "gateway.port")
