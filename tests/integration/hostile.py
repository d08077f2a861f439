"""Hostile requests as bytes on a socket: what they are made of, and what came back."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import orjson
from hypothesis import strategies as st

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ANSWER_WITHIN_S = 10.0
SILENT_AFTER_S = 0.1  # of a request that may be unfinished: then this side closes, and the server has to
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Hostile:
    """A request.

    Attributes:
        raw: what goes onto the wire.
        is_whole: the server must answer without more coming.
        is_ambiguous: two readers could see different requests in it; there must not be two answers.
    """

    raw: bytes
    is_whole: bool
    is_ambiguous: bool = False


@dataclass(frozen=True, slots=True)
class Came:
    """What a server did: all that it wrote, whether it closed, and for how long it took."""

    data: bytes
    closed: bool
    took_s: float

    @property
    def statuses(self) -> list[int]:
        """Of every answer on the connection, interim ones aside."""
        return [status for status in map(int, _STATUS.findall(self.data)) if status >= 200]


def exchange(port: int, request: Hostile) -> Came:
    """Sends it on a connection of its own and reads until there is an answer, or the server closes.

    Raises:
        TimeoutError: neither happened within 10 s.
    """
    began_s = perf_counter()
    data, closed, finished = b"", False, False
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_WITHIN_S) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.sendall(request.raw)
        while not closed and not (request.is_whole and _is_whole(data)):
            left_s = ANSWER_WITHIN_S - (perf_counter() - began_s)
            if left_s <= 0:
                raise TimeoutError(f"no answer within {ANSWER_WITHIN_S:g} s; there came {data[-200:]!r}")
            connection.settimeout(left_s if request.is_whole or finished else SILENT_AFTER_S)
            try:
                piece = connection.recv(2**16)
            except TimeoutError:
                if not request.is_whole and not finished:
                    connection.shutdown(socket.SHUT_WR)
                    finished = True
                continue
            except ConnectionResetError:
                piece = b""
            data, closed = data + piece, not piece
    return Came(data, closed, perf_counter() - began_s)


def _is_whole(data: bytes) -> bool:
    head, separator, body = data.partition(b"\r\n\r\n")
    if not separator:
        return False
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    if length is None:
        return body.endswith(b"0\r\n\r\n") or head.startswith((b"HTTP/1.1 204", b"HTTP/1.1 304"))
    return len(body) >= int(length[1])


# ---- what they are made of

JSON_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=30)
    | st.sampled_from([10**400, -1, 0, 2**31, 2**63, "", "\x00", "\ud800", "m@", "m@1+x", "../m", "A" * 5000])
)
JSON_VALUES = st.recursive(
    JSON_SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options",
    "stop", "temperature", "top_p", "seed", "user", "service_tier", "prompt_cache_key", "cache_salt", "priority",
    "kv_transfer_params", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "echo", "logit_bias",
    "metadata", "store", "best_of", "suffix", "dimensions", "encoding_format", "lora_request", "chat_template",
]  # fmt: skip
BASES: dict[str, dict[str, object]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 2},
    COMPLETIONS: {"model": "m", "prompt": "one two", "max_tokens": 2},
    EMBEDDINGS: {"model": "embedder", "input": ["one two"]},
}


def dumps(value: object) -> bytes:
    """JSON as Python writes it, with NaN, huge numbers and lone surrogates that orjson would refuse."""
    return json.dumps(value, ensure_ascii=True).encode()


@st.composite
def mutated_bodies(draw: st.DrawFn, path: str) -> bytes:
    """A good body with one to three fields replaced, added or left out."""
    body = dict(BASES.get(path, BASES[CHAT]))
    for _ in range(draw(st.integers(1, 3))):
        field = draw(st.sampled_from(FIELDS))
        if draw(st.integers(0, 5)) == 0:
            body.pop(field, None)
        else:
            body[field] = draw(JSON_VALUES)
    return dumps(body)


BROKEN_BODIES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            *(b"", b"null", b"[]", b"5", b'"m"', b"{", b'{"model":"m"}' * 2, b"\xef\xbb\xbf{}"),
            b'{"model":"m","model":"n"}',
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b"{" + b'"a":1,' * 20_000 + b'"b":2}',
            b'{"model":' + b"9" * 20_000 + b"}",
            b'{"model":"m","messages":NaN}',
            b'{"model":"\\ud800","messages":[]}',
            "\ufeff{}".encode("utf-16-le"),
            b'{"model":"m","messages":['
            + b'{"role":"user","content":"x"},' * 5000
            + b'{"role":"user","content":"y"}]}',
        ]
    ),
)
HEADER_NAMES = st.sampled_from(
    [
        *("x-request-id", "x-session-id", "idempotency-key", "x-request-timeout-ms", "traceparent", "x-target-replica"),
        *("content-type", "accept", "accept-encoding", "content-encoding", "expect", "connection", "upgrade", "cookie"),
        *("x-forwarded-for", "range", "host", "x-served-by", "te"),
    ]
)
HEADER_VALUES = st.one_of(
    st.binary(max_size=60).map(lambda raw: raw.replace(b"\n", b" ").replace(b"\r", b" ")),
    st.sampled_from(
        [
            *(b"", b"-1", b"0", b"1", b"99999999999999999999", b"nan", b"1e9", b"a" * 300, b"\xc3\xa4", b"*", b"()"),
            *(b"../../etc/passwd", b"100-continue", b"h2c", b"close", b"gzip", b"identity", b"text/plain"),
            *(b"'; drop table", b"%0d%0aset-cookie: a=b", b"multipart/form-data"),
            b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
        ]
    ),
)
METHODS = st.sampled_from(
    [*["POST"] * 12, "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "FOO"]
)
TARGETS = st.sampled_from(
    [
        *([CHAT] * 6 + [COMPLETIONS] * 3 + [EMBEDDINGS] * 2),
        *("/v1/generate", "/v1/moderations", "/tokenize", "/v1/responses", "/v1/models", "/v1/models/m", "/metrics"),
        *("/health", "/docs", "/", "/openapi.json", "//v1/chat/completions", "/v1/chat/completions/", "/%2e%2e/", "*"),
        *("/v1/chat/../completions", "http://127.0.0.1/v1/models", "/v1/chat/completions?" + "a=b&" * 500),
        *("/" + "a" * 9000, "/\xff"),
    ]
)


@st.composite
def requests(draw: st.DrawFn, tokens: Sequence[bytes]) -> Hostile:
    """A request that is hostile in its body, headers, token or framing, or in several of them."""
    method, target = draw(METHODS), draw(TARGETS)
    body = draw(st.one_of(mutated_bodies(target.partition("?")[0]), BROKEN_BODIES))
    headers = [(b"host", b"gateway.test")]
    if draw(st.integers(0, 9)):
        headers.append((b"authorization", draw(st.sampled_from(tokens))))
    for _ in range(draw(st.integers(0, 3))):
        headers.append((draw(HEADER_NAMES).encode(), draw(HEADER_VALUES)))
    framing = draw(st.integers(0, 5 * len(_TWISTS)))
    start = f"{method} {target} HTTP/1.1\r\n".encode("latin-1")
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    if framing < len(_TWISTS):
        return _TWISTS[framing](start + lines, body)
    has_body = method not in ("GET", "HEAD", "CONNECT", "TRACE")
    length = b"content-length: %d\r\n" % len(body) if has_body else b""
    odd = any(name in (b"expect", b"upgrade", b"connection") for name, _ in headers) or method in ("HEAD", "CONNECT")
    return Hostile(start + lines + length + b"\r\n" + (body if has_body else b""), is_whole=not odd)


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
_TWISTS = [
    lambda head, body: Hostile(  # both framings: whoever reads the other one sees a second request
        head + b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(SMUGGLED)) + SMUGGLED,
        is_whole=False, is_ambiguous=True,
    ),
    lambda head, body: Hostile(
        head + b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED, is_whole=False,
        is_ambiguous=True,
    ),
    lambda head, body: Hostile(
        head + b"transfer-encoding: xchunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n" + SMUGGLED, False, is_ambiguous=True
    ),
    lambda head, body: Hostile(head + b"transfer-encoding: chunked\r\n\r\nZZ\r\n" + body[:50], is_whole=False),
    lambda head, body: Hostile(head + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n", is_whole=False),
    lambda head, body: Hostile(head + b"content-length: %d\r\n\r\n" % (len(body) + 10) + body, is_whole=False),
    lambda head, body: Hostile(head + b"content-length: -5\r\n\r\n" + body, is_whole=False),
    lambda head, body: Hostile(head + b"x: " + b"a" * 70_000 + b"\r\n\r\n", is_whole=False),
    lambda head, body: Hostile(head + b"".join(b"x-%d: 1\r\n" % i for i in range(3000)) + b"\r\n", is_whole=False),
    lambda head, body: Hostile(head + b"no colon here\r\n\r\n" + body, is_whole=False),
    lambda head, body: Hostile(head[: len(head) // 2], is_whole=False),
    lambda head, body: Hostile(b"\x16\x03\x01\x02\x00" + body, is_whole=False),  # TLS on a plain port
]  # fmt: skip


def whole(path: str, body: object, authorization: bytes, **headers: str) -> Hostile:
    """A request in which only what is said is hostile."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "host: gateway.test", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join(lines).encode() + b"\r\nauthorization: " + authorization + b"\r\n\r\n"
    return Hostile(head + data, is_whole=True)
