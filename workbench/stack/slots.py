"""A gateway worker's place: its listening socket, which outlives the worker, and the pipe on which it says `ready`.

Connections that wait in the socket's queue are served by whichever worker has the place next: nothing is lost when a
worker is replaced, or dies. The kernel spreads a port's connections over its listening sockets, so a place in which no
worker comes up gives its socket up: the others take them all.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

from serving.gateway.sockets import bound


@dataclass(slots=True)
class HandOver:
    """What one worker is given.

    Attributes:
        listener_fd: the place's socket.
        ready_fd: the end of the pipe that the worker writes to; -1 once the worker has it.
    """

    listener_fd: int
    ready_fd: int
    _heard_fd: int
    _is_ready: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line's part."""
        return f"--listener-fd={self.listener_fd}", f"--ready-fd={self.ready_fd}"

    @property
    def fds(self) -> tuple[int, ...]:
        """What the child inherits."""
        return self.listener_fd, self.ready_fd

    def is_ready(self) -> bool:
        """Whether the worker has said that it serves."""
        if not self._is_ready and self._heard_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                self._is_ready = os.read(self._heard_fd, 64) != b""
        return self._is_ready

    def given(self) -> None:
        """The child has its copies."""
        if self.ready_fd >= 0:
            os.close(self.ready_fd)
            self.ready_fd = -1

    def close(self) -> None:
        """Nobody listens to the worker any more."""
        self.given()
        if self._heard_fd >= 0:
            os.close(self._heard_fd)
            self._heard_fd = -1


class Slot:
    """One worker's place on the port."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._listener: socket.socket | None = None

    def hand_over(self) -> HandOver:
        """The place's socket, which is made when there is none, and a pipe for one more worker.

        Raises:
            PortTaken: somebody listens there without sharing.
            OSError: the system has no more file descriptors.
        """
        if self._listener is None:
            # It begins to listen when its first worker does: until then the port's other workers take everything.
            self._listener = bound(self._host, self._port)
        heard_fd, ready_fd = os.pipe()
        os.set_blocking(heard_fd, False)
        return HandOver(self._listener.fileno(), ready_fd, heard_fd)

    def close(self) -> None:
        """Gives the socket up; a worker that has it goes on with it until it ends."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
