"""How an answer lies in the store: compressed, then sealed with a key that is its own.

    gateway's secret + tenant + tenant's salt ──HKDF──▶ tenant's key ──HMAC, run──▶ key of one run of one request
    answer ──deflate, flushed at each part──▶ AES-GCM, nonce = number of the part ──▶ parts

A run is a random name that is never used twice, so neither is a key with a nonce. The parts of an answer share one
deflate window: a stream's events repeat themselves, and 1 KB of them takes 40 bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from serving.core.errors import ServingError
from serving.gateway.http_errors import Headers

SALT_BYTES = 32
RUN_BYTES = 16
MAX_CACHED_KEYS = 4096

# 4 KB of window and small tables: 32 KB of memory a running stream, where zlib's own choice takes 256.
_WINDOW_BITS = 12
_MEM_LEVEL = 5
_LEVEL = 1

# What a replay repeats of the head; all else speaks of the request that ran.
_KEPT_HEADERS = frozenset((b"content-type", b"cache-control", b"x-accel-buffering", b"x-served-by"))


class BrokenReplay(ServingError):
    """A stored answer cannot be read: another secret sealed it, or the tenant's salt was deleted."""


class TenantKeys:
    """Keys and fingerprints from the gateway's secret; all workers need the same one."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._print_key = hmac.digest(secret, b"workbench replay fingerprints", "sha256")
        self._keys: dict[tuple[str, bytes], bytes] = {}

    def fingerprint(self, *parts: bytes) -> bytes:
        """16 bytes that stand for `parts`: nobody without the secret can try out what they were."""
        digest = hashlib.blake2b(key=self._print_key, digest_size=16)
        for part in parts:
            digest.update(b"%d:" % len(part))
            digest.update(part)
        return digest.digest()

    def of_run(self, tenant_id: str, salt: bytes, run: bytes) -> AESGCM:
        """What seals and opens the parts of one run."""
        key = self._keys.get((tenant_id, salt))
        if key is None:
            info = b"workbench replays of " + tenant_id.encode()
            key = HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(self._secret)
            if len(self._keys) >= MAX_CACHED_KEYS:
                del self._keys[next(iter(self._keys))]
            self._keys[tenant_id, salt] = key
        return AESGCM(hmac.digest(key, run, "sha256"))


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer. `is_stream`: its body comes in parts, else it is whole."""

    status: int
    is_stream: bool
    headers: Headers

    def encode(self) -> bytes:
        """The first line of what is stored."""
        kept = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers if _is_kept(name)]
        return orjson.dumps([self.status, self.is_stream, kept]) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Head:
        """What `encode` wrote."""
        status, is_stream, headers = orjson.loads(line)
        return cls(status, is_stream, [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers])


def _is_kept(name: bytes) -> bool:
    return name in _KEPT_HEADERS


class Sealer:
    """Makes parts of what is to be stored, in order."""

    def __init__(self, key: AESGCM) -> None:
        self._key = key
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -_WINDOW_BITS, _MEM_LEVEL)
        self.num_parts = 0

    def part(self, data: bytes) -> bytes:
        """The next part."""
        packed = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        sealed = self._key.encrypt(_nonce(self.num_parts), packed, None)
        self.num_parts += 1
        return sealed


class Opener:
    """Reads parts in order.

    Attributes:
        head: of the answer, once the first part was read.
        num_parts: read so far.
    """

    def __init__(self, key: AESGCM) -> None:
        self._key = key
        self._inflate = zlib.decompressobj(-_WINDOW_BITS)
        self.head: Head | None = None
        self.num_parts = 0

    def body(self, parts: Sequence[bytes]) -> bytes:
        """The piece of the body that is in the next `parts`. Raises BrokenReplay."""
        opened = []
        try:
            for part in parts:
                opened.append(self._inflate.decompress(self._key.decrypt(_nonce(self.num_parts), part, None)))
                self.num_parts += 1
        except (InvalidTag, zlib.error) as error:
            raise BrokenReplay(f"part {self.num_parts} of a stored answer cannot be opened") from error
        data = b"".join(opened)
        if self.head is None and data:
            line, _, data = data.partition(b"\n")
            self.head = Head.decode(line)
        return data


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
