"""Key sets of issuers (JWKS, RFC 7517): read, checked, and fetched from where the issuer publishes them.

Only public keys for signatures that we verify are taken: RSA of 2,048 to 8,192 bits for RS256, P-256 for ES256.
Others are passed over; a set with a private or a symmetric key is refused, for it should not be here.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from serving.store.connection import BrokenDocument, StoreUnavailable

MAX_JWKS_BYTES = 256 * 1024
MAX_KEYS = 100
RSA_BITS = range(2048, 8193)
FETCH_TIMEOUT_S = 5.0
_CHUNK_BYTES = 16 * 1024

Fetch = Callable[[str], Awaitable[str]]
"""Fetches the key set at a URL. Raises StoreUnavailable, BrokenDocument."""


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A public key: its id in the set, the one algorithm that it is for, and the key as PyJWT takes it."""

    kid: str | None
    algorithm: str
    key: RSAPublicKey | EllipticCurvePublicKey


def parse_jwks(text: str) -> tuple[VerifyKey, ...]:
    """The keys of a set that can verify RS256 or ES256.

    Raises:
        BrokenDocument: no JSON, no key set, none that can be used, or one that must not be public.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenDocument("key set: not JSON") from error
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list) or len(keys) > MAX_KEYS:
        raise BrokenDocument(f'key set: not {{"keys": […]}} with at most {MAX_KEYS} keys')
    usable = [key for entry in keys if isinstance(entry, dict) and (key := _verify_key(entry)) is not None]
    if not usable:
        raise BrokenDocument("key set: no public RSA (2048 to 8192 bits) or P-256 key for signatures in it")
    return tuple(usable)


def in_one_order(text: str) -> str:
    """The same set in the same text, in whatever order its issuer tells the keys this time."""
    keys = [json.dumps(key, sort_keys=True) for key in json.loads(text)["keys"]]
    return f'{{"keys": [{", ".join(sorted(keys))}]}}'


async def fetch_jwks(url: str) -> str:
    """The key set at `url` as text, checked and in one order; within 5 s, through the proxy of the environment.

    Raises:
        StoreUnavailable: not reached, or not answered with 200.
        BrokenDocument: what came is no key set.
    """
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):  # looking up a name has no timeout of its own
            return await asyncio.to_thread(_fetch, url)
    except TimeoutError:
        raise StoreUnavailable(f"cannot fetch the key set at {url}: no answer within {FETCH_TIMEOUT_S:g} s") from None


class _Body(Protocol):
    def read1(self, n: int = -1, /) -> bytes: ...


def _fetch(url: str) -> str:
    deadline_s = time.monotonic() + FETCH_TIMEOUT_S
    request = urllib.request.Request(url, headers={"accept": "application/json", "user-agent": "llm-workbench"})
    try:
        with _OPENER.open(request, timeout=FETCH_TIMEOUT_S) as answer:
            data = _read(answer, deadline_s)
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        raise StoreUnavailable(f"cannot fetch the key set at {url}: {reason}") from error
    if len(data) > MAX_JWKS_BYTES:
        raise BrokenDocument(f"key set at {url}: over {MAX_JWKS_BYTES} bytes")
    text = data.decode("utf-8", "replace")
    parse_jwks(text)
    return in_one_order(text)


def _read(answer: _Body, deadline_s: float) -> bytes:
    """All of the body, or a byte more than is allowed. The socket's timeout is only that of one piece."""
    data = b""
    while len(data) <= MAX_JWKS_BYTES and (piece := answer.read1(_CHUNK_BYTES)):
        if time.monotonic() > deadline_s:
            raise TimeoutError("it comes too slowly")
        data += piece
    return data


class _StaysSafe(urllib.request.HTTPRedirectHandler):
    """A redirect must not lead from https to http, or to a file."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The request to go on with. Raises HTTPError."""
        if urlsplit(newurl).scheme not in {"https", urlsplit(req.full_url).scheme}:
            raise urllib.error.HTTPError(newurl, code, "redirected to what is not https", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_StaysSafe)


def _verify_key(entry: dict[str, Any]) -> VerifyKey | None:
    if entry.get("kty") == "oct" or "d" in entry:
        raise BrokenDocument("key set: it holds a private or symmetric key; publish the public ones only")
    algorithm = {"RSA": "RS256", "EC": "ES256"}.get(str(entry.get("kty")))
    kid = entry.get("kid")
    if algorithm is None or entry.get("alg", algorithm) != algorithm or entry.get("use", "sig") != "sig":
        return None
    if not (kid is None or isinstance(kid, str)) or not _may_verify(entry.get("key_ops")):
        return None
    try:
        key = jwt.PyJWK(entry, algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
        return None
    return VerifyKey(kid, algorithm, key) if _is_strong(key) else None


def _may_verify(operations: object) -> bool:
    return operations is None or (isinstance(operations, list) and "verify" in operations)


def _is_strong(key: object) -> bool:
    if isinstance(key, RSAPublicKey):
        return key.key_size in RSA_BITS
    return isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
