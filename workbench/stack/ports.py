"""Whether a port is free, and who holds it when it is not."""

from __future__ import annotations

import socket

import psutil


class PortTaken(Exception):
    """Another process listens on a port that the stack needs."""


def check_port(host: str, port: int, setting: str) -> None:
    """Tries to listen on the port.

    Args:
        host: the address that the server will listen on.
        port: its port.
        setting: the configuration key that names it, for the message.

    Raises:
        PortTaken: with the holder's pid and command where the system tells, and what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            variable = f"WORKBENCH__{setting.upper().replace('.', '__')}"
            raise PortTaken(
                f"{setting}: cannot listen on {host}:{port} ({_reason(port, error)}); "
                f"end that process, or choose another port: {variable}={port + 1}"
            ) from None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _reason(port: int, error: OSError) -> str:
    holder = holder_of(port)
    if holder is None:
        return (error.strerror or str(error)).lower()
    return f"pid {holder.pid} holds it: {_command(holder)}"


def holder_of(port: int) -> psutil.Process | None:
    """The process that listens on `port`, where the system tells us."""
    try:
        connections = psutil.net_connections(kind="tcp")
        pid = next((c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port), None)
        return None if pid is None else psutil.Process(pid)
    except psutil.Error:
        return None


def _command(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "unknown command"
    return command if len(command) <= 120 else command[:119] + "…"
