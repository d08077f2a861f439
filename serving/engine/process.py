"""One vLLM replica as a child process: start, health, warm-up, drain, stop.

Phases of a cold start, in seconds, and how each is told from the next:

    spawn     until the operating system runs the child
    import    until the engine's banner is in its log, or until it is healthy if none ever comes
    load      until GET /health answers 200: model inspection, engine core, weights, KV cache
    warm_up   until the first requests are answered

The child leads its own process group, so that a stop takes everything with it. Its log file is the only pipe:
it can never block on us, and it is there to read after a crash.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from serving.core.errors import EngineError, UpstreamError
from serving.core.ports import Clock
from serving.core.state import Task
from serving.engine import process_group
from serving.engine.client import EngineClient
from serving.engine.engine_log import EngineLog
from serving.engine.environment import engine_environment
from serving.engine.flags import VLLM_SERVER_MODULE, EngineFlags, HardwareKind
from serving.engine.warm_up import warm_up
from serving.engine.weights import Weights

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_SIGKILL_WAIT_S = 30.0


class Phase(StrEnum):
    """Parts of a cold start."""

    SPAWN = "spawn"
    IMPORT = "import"
    LOAD = "load"
    WARM_UP = "warm_up"


OnPhase = Callable[[Phase], None]


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What to start.

    Attributes:
        replica_id: unique in the fleet.
        model_name: the name that requests use.
        weights: from `weights.resolve`.
        flags: the engine's configuration.
        log_path: appended to; one file a replica.
        task: generate or embed.
        hardware: the vLLM build to run on.
        port: None takes a free one at each start.
        cores: CPU cores that the replica may use; None leaves it to the system.
        host: address to bind.
        start_timeout_s: after this the replica counts as never healthy.
    """

    replica_id: str
    model_name: str
    weights: Weights
    flags: EngineFlags
    log_path: Path
    task: Task = Task.GENERATE
    hardware: HardwareKind = HardwareKind.CPU
    port: int | None = None
    cores: tuple[int, ...] | None = None
    host: str = "127.0.0.1"
    start_timeout_s: float = 300.0


Command = Callable[[ReplicaSpec, int], list[str]]


def vllm_command(spec: ReplicaSpec, port: int) -> list[str]:
    """The command line of vLLM's OpenAI server for `spec`, listening on `port`."""
    arguments = spec.flags.to_args(
        model=str(spec.weights.path), served_name=spec.model_name, task=spec.task, host=spec.host, port=port
    )
    if spec.weights.revision is not None:
        arguments += ["--revision", spec.weights.revision]
    return [sys.executable, "-m", VLLM_SERVER_MODULE, *arguments]


class ReplicaProcess:
    """Starts and stops one replica. Used once: a restart is a new object.

    Args:
        spec: what to start.
        clock: measures the phases.
        command: builds the command line; another than vLLM's in tests.
        teardown_s: what a stop allows beyond draining; an idle engine takes 7 s from SIGTERM to its end.
    """

    def __init__(
        self, spec: ReplicaSpec, clock: Clock, *, command: Command = vllm_command, teardown_s: float = 15.0
    ) -> None:
        self.spec = spec
        self.port: int | None = spec.port
        self.phases_s: dict[str, float] = {}
        self._clock = clock
        self._command = command
        self._teardown_s = teardown_s
        self._process: Process | None = None
        self._has_ended = False
        self._pids: set[int] = set()
        self._log = EngineLog(spec.log_path)
        self._phase_began_s = 0.0

    @property
    def pid(self) -> int | None:
        """Pid of the group's leader, which is also the group's id."""
        return self._process.pid if self._process else None

    @property
    def url(self) -> str:
        """Base URL; valid once `start` has chosen a port."""
        return f"http://{self.spec.host}:{self.port}"

    @property
    def is_alive(self) -> bool:
        """Whether the leader runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self, on_phase: OnPhase = lambda _: None) -> None:
        """Spawns the engine and returns when it is healthy and warm.

        Raises:
            EngineError: the port is taken, the engine died, or was not healthy within `start_timeout_s`;
                with the last lines of its log. Nothing is left running then, or after a cancellation.
        """
        self.port = _choose_port(self.spec.host, self.spec.port)
        deadline_s = self._clock.monotonic_s() + self.spec.start_timeout_s
        self._phase_began_s = self._clock.monotonic_s()
        on_phase(Phase.SPAWN)
        try:
            await self._spawn()
            self._end_phase(Phase.SPAWN)
            async with EngineClient(self.url) as client:
                await self._wait_until_healthy(client, deadline_s, on_phase)
                on_phase(Phase.WARM_UP)
                await self._warm_up(client, deadline_s)
            self._end_phase(Phase.WARM_UP)
        except BaseException:
            await self.kill()
            raise
        self._pids |= process_group.pids_of(self._started.pid)

    async def wait(self) -> str:
        """Waits for the leader's end, ends what it left behind, and says how it ended."""
        await self._started.wait()
        await self.kill()
        return self._ending()

    async def is_healthy(self, timeout_s: float = _PROBE_TIMEOUT_S) -> bool:
        """Whether GET /health answers 200 within `timeout_s`."""
        async with EngineClient(self.url) as client:
            return await probe(client, timeout_s)

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Lets requests in flight finish, then ends the whole group. Stop routing to it first.

        Args:
            drain_timeout_s: seconds that requests get; None takes the engine's own `shutdown_timeout_s`,
                which also bounds a longer one.
        """
        if self.is_alive:
            limit_s = self.spec.flags.shutdown_timeout_s if drain_timeout_s is None else drain_timeout_s
            self._pids |= process_group.pids_of(self._started.pid)
            self._started.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(limit_s + self._teardown_s):
                    await self._started.wait()
            except TimeoutError:
                pass  # vLLM can hang in its shutdown with a stream open; the kill below is for that
        await self.kill()

    async def kill(self) -> None:
        """Ends the whole group at once and removes what it left in shared memory."""
        if self._process is None or self._has_ended:
            return
        self._pids |= process_group.pids_of(self._process.pid)
        process_group.kill(self._process.pid)
        await self._process.wait()
        # The system tells a parent of its own child's end, not of the rest of the group's.
        deadline_s = self._clock.monotonic_s() + _SIGKILL_WAIT_S
        while True:
            survivors = process_group.pids_of(self._process.pid)
            if not survivors:
                break
            if self._clock.monotonic_s() > deadline_s:
                raise EngineError(f"processes {survivors} of replica {self.spec.replica_id} survive SIGKILL")
            await asyncio.sleep(_POLL_S / 10)
        self._has_ended = True  # from here on its pid may be somebody else's
        process_group.remove_shared_memory(self._pids)

    def last_log_lines(self) -> str:
        """The end of this start's log."""
        return self._log.tail()

    @property
    def _started(self) -> Process:
        if self._process is None:
            raise EngineError(f"replica {self.spec.replica_id} was never started")
        return self._process

    async def _spawn(self) -> None:
        spec = self.spec
        command = self._command(spec, self.port or 0)
        environment = engine_environment(spec.hardware, spec.flags, is_offline=spec.weights.served != "hf")
        try:
            self._log.begin(shlex.join(command))
            with spec.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    env=environment.over(os.environ),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"replica {spec.replica_id} could not be started: {error}") from error
        if spec.cores is not None:
            # The child has not made a thread yet: all that it makes inherits this.
            os.sched_setaffinity(self._process.pid, spec.cores)

    async def _wait_until_healthy(self, client: EngineClient, deadline_s: float, on_phase: OnPhase) -> None:
        phase = Phase.IMPORT
        on_phase(phase)
        while True:
            self._check_running(deadline_s)
            if phase is Phase.IMPORT and self._log.has_banner():
                self._end_phase(phase)
                phase = Phase.LOAD
                on_phase(phase)
            if await probe(client, _PROBE_TIMEOUT_S):
                break
            await asyncio.sleep(_POLL_S)
        self._end_phase(phase)
        self.phases_s.setdefault(Phase.LOAD, 0.0)

    async def _warm_up(self, client: EngineClient, deadline_s: float) -> None:
        spec = self.spec
        left_s = max(1.0, deadline_s - self._clock.monotonic_s())
        try:
            await warm_up(client, model_name=spec.model_name, task=spec.task, weights=spec.weights, timeout_s=left_s)
        except EngineError as error:
            raise EngineError(f"{error.message}\n{self._log.excerpt()}") from error

    def _check_running(self, deadline_s: float) -> None:
        if not self.is_alive:
            raise EngineError(f"replica {self.spec.replica_id} died while starting: {self._ending()}")
        if self._clock.monotonic_s() > deadline_s:
            limit_s = self.spec.start_timeout_s
            raise EngineError(
                f"replica {self.spec.replica_id} was not healthy within {limit_s:g} s\n{self._log.excerpt()}"
            )

    def _end_phase(self, phase: Phase) -> None:
        now_s = self._clock.monotonic_s()
        self.phases_s[phase] = now_s - self._phase_began_s
        self._phase_began_s = now_s

    def _ending(self) -> str:
        code = self._started.returncode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}\n{self._log.excerpt()}"


async def probe(client: EngineClient, timeout_s: float) -> bool:
    """Whether the engine behind `client` answers GET /health with 200."""
    try:
        await client.get_json("/health", timeout_s=timeout_s)
    except UpstreamError:
        return False
    return True


def _choose_port(host: str, wanted: int | None) -> int:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((host, wanted or 0))
        except OSError as error:
            raise EngineError(f"port {wanted} on {host} is taken ({error.strerror}): choose another one") from error
        port: int = candidate.getsockname()[1]
        return port
