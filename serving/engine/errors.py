"""How a request to an engine can fail, told apart by what the caller may do next.

UpstreamError
├── ConnectFailed      nothing was sent: safe to try another replica
├── ConnectionLost     the request was sent and the answer is not complete
└── UnexpectedStatus   a complete answer whose status is not 2xx (raised by the JSON helpers only)
"""

from __future__ import annotations

from serving.core.errors import ErrorCode, UpstreamError


class ConnectFailed(UpstreamError):
    """No byte of the request was sent: the engine did no work, any other replica may be tried."""


class ConnectionLost(UpstreamError):
    """The engine broke off, sent what is no HTTP, or exceeded the timeout (`code` is then `upstream_timeout`).

    The engine may have done work.

    Attributes:
        received_any: whether any byte of the response had come.
    """

    def __init__(self, message: str, *, received_any: bool, code: ErrorCode | None = None) -> None:
        super().__init__(message, code=code)
        self.received_any = received_any


class UnexpectedStatus(UpstreamError):
    """The engine answered in full, but not with a 2xx status.

    Attributes:
        engine_status: the HTTP status of the engine's answer.
        body: the engine's answer.
    """

    def __init__(self, message: str, *, engine_status: int, body: bytes) -> None:
        super().__init__(message)
        self.engine_status = engine_status
        self.body = body
