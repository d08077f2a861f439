"""The life of a replica without vLLM: the fake engine, and small scripts that misbehave, as child processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from serving.clock import SystemClock
from serving.core.errors import EngineError
from serving.core.state import ReplicaState, Task
from serving.engine import process_group
from serving.engine.client import EngineClient
from serving.engine.flags import EngineFlags
from serving.engine.launchers import ReplicaStatus
from serving.engine.launchers.attach import AttachLauncher
from serving.engine.launchers.local import Backoff, LocalLauncher
from serving.engine.process import Command, Phase, ReplicaProcess, ReplicaSpec
from serving.engine.weights import Weights

FAST = Backoff(first_s=0.05, longest_s=0.2)


def spec(tmp_path: Path, **changes: object) -> ReplicaSpec:
    given = {
        "replica_id": "r0",
        "model_name": "fake-model",
        "weights": Weights(tmp_path, "sha256:0", str(tmp_path), "local"),
        "flags": EngineFlags(shutdown_timeout_s=1),
        "log_path": tmp_path / "r0.log",
        "start_timeout_s": 30.0,
    }
    return ReplicaSpec(**(given | changes))  # type: ignore[arg-type]


def fake_engine(spec: ReplicaSpec, port: int) -> list[str]:
    return [sys.executable, "-m", "serving.engine.fake", "--model", spec.model_name, "--port", str(port)]


def script(text: str) -> Command:
    """A child that runs `text` with PORT set."""
    return lambda spec, port: [sys.executable, "-c", f"PORT = {port}\n{text}"]


NEVER_HEALTHY = "import time; print('sitting here', flush=True); time.sleep(60)"
WITH_BANNER = """
import http.server, time
print('(APIServer) non-default args: {}', flush=True)
time.sleep(0.3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header('content-length', '0'); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers['content-length'])); self.do_GET()
http.server.HTTPServer(('127.0.0.1', PORT), Handler).serve_forever()
"""
HANGS_ON_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WITH_BANNER
WITH_CHILD = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n" + WITH_BANNER
)
GOES_DEAF = WITH_BANNER.replace(
    "def do_GET(self):",
    "num = 0\n    def do_GET(self):\n        Handler.num += 1\n        if Handler.num > 4: time.sleep(60)",
)


async def test_start_is_healthy_warm_and_timed_and_stop_leaves_nothing(tmp_path: Path) -> None:
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=fake_engine)
    phases: list[Phase] = []
    await replica.start(phases.append)
    assert replica.is_alive
    assert await replica.is_healthy()
    assert phases == [Phase.SPAWN, Phase.IMPORT, Phase.WARM_UP]
    assert set(replica.phases_s) == {"spawn", "import", "load", "warm_up"}
    assert all(seconds >= 0 for seconds in replica.phases_s.values())
    async with EngineClient(replica.url) as client:
        answer = await client.post_json("/v1/completions", {"model": "fake-model", "prompt": "a b", "max_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2
    pid = replica.pid
    assert pid is not None
    assert process_group.memory_bytes(pid) > 1e6
    await replica.stop()
    assert not replica.is_alive
    assert process_group.pids_of(pid) == set()


async def test_the_banner_in_the_log_ends_the_import_phase(tmp_path: Path) -> None:
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=script(WITH_BANNER))
    phases: list[Phase] = []
    await replica.start(phases.append)
    await replica.kill()
    assert phases == list(Phase)
    assert replica.phases_s["load"] > 0.1


async def test_an_embedding_replica_is_warmed_by_an_embedding(tmp_path: Path) -> None:
    replica = ReplicaProcess(spec(tmp_path, task=Task.EMBED), SystemClock(), command=fake_engine)
    await replica.start()
    await replica.stop()


async def test_cores_bind_the_child(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    replica = ReplicaProcess(spec(tmp_path, cores=(core,)), SystemClock(), command=fake_engine)
    await replica.start()
    assert replica.pid is not None
    assert os.sched_getaffinity(replica.pid) == {core}
    await replica.stop()


async def test_a_crash_at_the_start_says_so_with_the_logs_last_lines(tmp_path: Path) -> None:
    cause = "raise ValueError('no such dtype')"
    text = f"import sys\ntry:\n    {cause}\nexcept ValueError as e:\n    print('ValueError:', e)\n"
    text += "print('\\n'.join(f'line {i}' for i in range(40))); sys.exit(3)"
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=script(text))
    with pytest.raises(EngineError) as caught:
        await replica.start()
    message = caught.value.message
    assert "died while starting: exit code 3" in message
    assert "line 39" in message
    assert "line 10" not in message
    assert "ValueError: no such dtype" in message  # scrolled out, and named all the same
    assert str(tmp_path / "r0.log") in message


async def test_a_replica_that_never_becomes_healthy_is_given_up_and_ended(tmp_path: Path) -> None:
    never = spec(tmp_path, start_timeout_s=1.0)
    replica = ReplicaProcess(never, SystemClock(), command=script(NEVER_HEALTHY))
    with pytest.raises(EngineError, match=r"not healthy within 1 s(.|\n)*sitting here"):
        await replica.start()
    assert replica.pid is not None
    assert process_group.pids_of(replica.pid) == set()


async def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        replica = ReplicaProcess(spec(tmp_path, port=port), SystemClock(), command=fake_engine)
        with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 is taken"):
            await replica.start()
    assert replica.pid is None


async def test_a_command_that_does_not_exist_is_an_engine_error(tmp_path: Path) -> None:
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=lambda _spec, _port: ["/no/such/engine"])
    with pytest.raises(EngineError, match="could not be started"):
        await replica.start()


async def test_cancelling_a_start_ends_the_child(tmp_path: Path) -> None:
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=script(NEVER_HEALTHY))
    start = asyncio.create_task(replica.start())
    await until(lambda: replica.is_alive)
    start.cancel()
    await asyncio.wait({start})
    assert replica.pid is not None
    assert process_group.pids_of(replica.pid) == set()


@pytest.mark.parametrize("text", [HANGS_ON_TERM, WITH_CHILD], ids=["ignores SIGTERM", "has a child"])
async def test_stop_ends_the_whole_group(tmp_path: Path, text: str) -> None:
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=script(text), teardown_s=0.5)
    await replica.start()
    assert replica.pid is not None
    assert process_group.pids_of(replica.pid)
    await replica.stop(drain_timeout_s=0.1)
    assert process_group.pids_of(replica.pid) == set()


def test_shared_memory_of_the_dead_is_removed_and_that_of_the_living_is_not() -> None:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("this system has no writable /dev/shm")
    dead, alive = 4_194_301, os.getpid()  # the first is above what most systems give out
    paths = [folder / f"__TEST_LIB_{pid}_0" for pid in (dead, alive)]
    for path in paths:
        path.write_bytes(b"x")
    try:
        assert process_group.remove_shared_memory({dead, alive}) == [paths[0].name]
        assert [path.exists() for path in paths] == [False, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


class Told:
    """Collects statuses."""

    def __init__(self) -> None:
        self.statuses: list[ReplicaStatus] = []

    def __call__(self, status: ReplicaStatus) -> None:
        self.statuses.append(status)

    @property
    def last(self) -> ReplicaStatus:
        return self.statuses[-1]

    def states(self) -> list[ReplicaState]:
        """Without repetitions."""
        return [s.state for i, s in enumerate(self.statuses) if i == 0 or self.statuses[i - 1].state is not s.state]


@pytest.fixture
async def told() -> Told:
    return Told()


@pytest.fixture
async def make_launcher(told: Told) -> AsyncIterator[Callable[..., LocalLauncher]]:
    made: list[LocalLauncher] = []

    def make(command: Command, **changes: object) -> LocalLauncher:
        given = {"backoff": FAST, "probe_interval_s": 0.1} | changes
        launcher = LocalLauncher(
            clock=SystemClock(),
            rng=random.Random(0),
            on_status=told,
            command=command,
            **given,  # type: ignore[arg-type]
        )
        made.append(launcher)
        return launcher

    yield make
    for launcher in made:
        await launcher.stop()


async def test_a_killed_replica_is_reported_and_started_again(
    tmp_path: Path, told: Told, make_launcher: Callable[..., LocalLauncher]
) -> None:
    launcher = make_launcher(fake_engine)
    launcher.launch(spec(tmp_path))
    first = await launcher.until_ready("r0")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: told.last.state is ReplicaState.READY and told.last.num_restarts == 1)
    starting, ready = ReplicaState.STARTING, ReplicaState.READY
    assert told.states() == [starting, ready, ReplicaState.DOWN, starting, ready]
    (down,) = [status for status in told.statuses if status.state is ReplicaState.DOWN]
    assert down.error is not None
    assert "killed by SIGKILL" in down.error
    assert told.last.error is None
    assert told.last.pid not in (None, first.pid)


async def test_what_fails_to_start_is_tried_again_without_end(
    tmp_path: Path, told: Told, make_launcher: Callable[..., LocalLauncher]
) -> None:
    launcher = make_launcher(script("raise SystemExit('out of memory')"))
    launcher.launch(spec(tmp_path))
    with pytest.raises(EngineError, match="out of memory"):
        await launcher.until_ready("r0", num_tries=3)
    assert told.last.num_restarts == 2
    await until(lambda: told.last.num_restarts > 3)


async def test_a_replica_that_runs_but_does_not_answer_is_replaced(
    tmp_path: Path, told: Told, make_launcher: Callable[..., LocalLauncher]
) -> None:
    launcher = make_launcher(script(GOES_DEAF), probe_timeout_s=0.2)
    launcher.launch(spec(tmp_path))
    await launcher.until_ready("r0")
    await until(lambda: any(status.state is ReplicaState.DOWN for status in told.statuses))
    (down, *_) = [status for status in told.statuses if status.state is ReplicaState.DOWN]
    assert "did not answer /health 3 times" in (down.error or "")


async def test_removal_drains_ends_and_forgets(
    tmp_path: Path, told: Told, make_launcher: Callable[..., LocalLauncher]
) -> None:
    launcher = make_launcher(fake_engine)
    launcher.launch(spec(tmp_path))
    ready = await launcher.until_ready("r0")
    with pytest.raises(EngineError, match="already running"):
        launcher.launch(spec(tmp_path))
    assert ready.pid is not None
    await launcher.remove("r0", settle_s=0.05)
    assert told.states()[-2:] == [ReplicaState.DRAINING, ReplicaState.DOWN]
    assert launcher.statuses() == ()
    assert process_group.pids_of(ready.pid) == set()


async def test_attached_replicas_are_watched_and_never_touched(tmp_path: Path, told: Told) -> None:
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=fake_engine)
    await replica.start()
    watcher = AttachLauncher(
        {"far-0": replica.url}, clock=SystemClock(), on_status=told, probe_interval_s=0.05, probe_timeout_s=1.0
    )
    watcher.start()
    await until(lambda: bool(told.statuses) and told.last.state is ReplicaState.READY)
    assert told.last.url == replica.url
    await replica.kill()
    await until(lambda: told.last.state is ReplicaState.DOWN)
    assert "did not answer" in (told.last.error or "")
    await watcher.stop()
    assert watcher.statuses() == (told.last,)


async def test_what_has_ended_is_not_killed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = ReplicaProcess(spec(tmp_path), SystemClock(), command=script(WITH_BANNER))
    await replica.start()
    await replica.kill()
    killed: list[int] = []
    monkeypatch.setattr(process_group, "kill", killed.append)  # the pid may be a stranger's now
    await replica.stop()
    await replica.kill()
    assert killed == []
