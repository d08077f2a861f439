"""The port that the workers share, and a clear word when it is somebody else's."""

from __future__ import annotations

import errno
import socket

from serving.core.errors import ServingError

BACKLOG = 2048


class PortTaken(ServingError):
    """Somebody else listens there; the message names the port and what to do."""


def bound(host: str, port: int) -> socket.socket:
    """A socket on the port, which it may share with others of the same user; it takes connections once it listens.

    It can't tell this gateway's workers from another gateway's: whoever starts workers looks first whether the port
    is free.

    Raises:
        PortTaken: somebody listens there without sharing.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without it, connections of a gateway that just ended would keep the port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortTaken(_advice(host, port, error)) from error
    listener.setblocking(False)
    return listener


def listen(host: str, port: int) -> socket.socket:
    """A listening socket of this worker's own; connections wait there until they are accepted.

    Raises:
        PortTaken: somebody listens there without sharing.
    """
    listener = bound(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # two may be bound to a port, and one of them not willing to share its connections
        listener.close()
        raise PortTaken(_advice(host, port, error)) from error
    return listener


def inherited(fd: int) -> socket.socket:
    """The socket that a supervisor made with `bound` and keeps; it outlives this worker, with what waits in it.

    Raises:
        OSError: `fd` is no stream socket.
    """
    listener = socket.socket(fileno=fd)
    if listener.type is not socket.SOCK_STREAM:
        listener.detach()
        raise OSError(errno.ENOTSOCK, f"file descriptor {fd} is no TCP socket")
    listener.set_inheritable(False)  # a check's child must not keep the port
    listener.setblocking(False)
    return listener


def limit_unread(listener: socket.socket, seconds: float) -> None:
    """The kernel aborts a connection that was accepted from it when nothing it sent was taken for so long.

    It holds for what the worker no longer looks after too: an answer that is complete, and never read.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def _advice(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is taken by another program: stop it (`ss -ltnp 'sport = :{port}'` names it) "
            "or choose another port (--port, WORKBENCH_GATEWAY_PORT)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights than this user has: choose one above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
