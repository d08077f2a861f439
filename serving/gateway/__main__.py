"""`python -m serving.gateway --port P`: one worker. Several on one port share its connections.

Everything else is set by WORKBENCH_GATEWAY_* variables, see serving/settings.py. SIGTERM stops it: it takes no more
connections, those it has are told to go elsewhere, requests in flight have `drain_timeout_s` to finish. Exit status:
0 after a stop, 1 when it could not start, 2 for wrong settings.

A supervisor gives it a socket (--listener-fd) to take connections from and to leave behind, and a pipe (--ready-fd)
to say `ready` on.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import uvicorn
import uvloop
from pydantic import ValidationError

from serving.gateway.hot_protocol import HotProtocol
from serving.gateway.sockets import PortTaken, inherited, limit_unread, listen
from serving.settings import GatewaySettings, UnknownSetting
from serving.telemetry import shared_folder
from serving.telemetry.logs import log_to_stderr

logger = logging.getLogger("serving.gateway")

# Longer than the clients' own pools keep a connection, so that they close first.
KEEP_ALIVE_S = 75


@dataclass(frozen=True, slots=True)
class Handed:
    """File descriptors that a supervisor handed over; None where a worker is started by hand."""

    listener_fd: int | None = None
    ready_fd: int | None = None


def main(arguments: list[str] | None = None) -> int:
    """Runs a worker until it is stopped; returns the exit status."""
    try:
        settings, handed = read_settings(arguments)
    except (ValidationError, UnknownSetting) as error:
        sys.stderr.write(f"wrong settings: {error}\n")
        return 2
    log_to_stderr(settings.log_level)
    signal.signal(signal.SIGTERM, _stop)  # uvicorn sends the signal on once it has drained
    if settings.metrics_dir is not None:
        shared_folder.share(settings.metrics_dir)
    try:
        status: int = uvloop.run(serve(settings, handed))
    except (PortTaken, ValueError, OSError) as error:
        logger.error("the gateway cannot start: %s", error)
        return 1
    return status


def read_settings(arguments: list[str] | None) -> tuple[GatewaySettings, Handed]:
    """Settings from the environment, with the command line over them, and what a supervisor handed over.

    Raises:
        ValidationError, UnknownSetting: a setting is wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m serving.gateway", description=__doc__)
    parser.add_argument("--host", help="address to listen on (WORKBENCH_GATEWAY_HOST)")
    parser.add_argument("--port", type=int, help="port, shared by the workers (WORKBENCH_GATEWAY_PORT)")
    parser.add_argument("--listener-fd", type=int, help="an inherited socket to listen on, instead of one of its own")
    parser.add_argument("--ready-fd", type=int, help="an inherited pipe to say `ready` on")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    handed = Handed(given.pop("listener_fd"), given.pop("ready_fd"))
    return GatewaySettings(**{name: value for name, value in given.items() if value is not None}), handed


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


async def serve(settings: GatewaySettings, handed: Handed) -> int:
    """Serves until SIGTERM or SIGINT.

    Raises:
        PortTaken: somebody else has the port.
        OSError: what was handed over is no socket.
    """
    # Imported late: prometheus_client decides when it is imported whether its metrics are shared.
    from serving.gateway.app import Gateway
    from serving.gateway.server import Worker, WorkerServer

    fd = handed.listener_fd
    listener = listen(settings.host, settings.port) if fd is None else inherited(fd)
    limit_unread(listener, settings.write_timeout_s)
    HotProtocol.write_timeout_s = settings.write_timeout_s
    worker = Worker(Gateway(settings))
    config = uvicorn.Config(
        worker,
        loop="none",
        http=HotProtocol,
        proxy_headers=False,  # the application itself, not wrapped: exchanges go past ASGI
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = WorkerServer(
        config,
        worker,
        drain_timeout_s=settings.drain_timeout_s,
        waits_for_table=fd is not None,
        ready_fd=handed.ready_fd,
    )
    logger.info("listening on http://%s:%d", settings.host, settings.port)
    await server.serve(sockets=[listener])
    return 0 if server.started or server.should_exit else 1


if __name__ == "__main__":
    sys.exit(main())
