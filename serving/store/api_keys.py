"""API keys: how they are made, read and hashed.

    wb_<key_id>_<secret>        key_id 12, secret 48 hexadecimal digits (192 bits)

A key is shown once, to whoever made it. What is kept is its SHA-256: a random secret of that length needs no slow
hash. The fixed beginning is what scanners of repositories and logs look for.
"""

from __future__ import annotations

import hashlib
import re
import secrets

PREFIX = "wb_"
NUM_ID_BYTES = 6
NUM_SECRET_BYTES = 24

# Keys made elsewhere may be imported by their hash: any secret of at least 128 bits in base64 or more.
_KEY = re.compile(rb"wb_(?P<key_id>[a-z0-9]{4,32})_[A-Za-z0-9_-]{22,200}")


def new_key(key_id: str) -> str:
    """A new key of that id."""
    return f"{PREFIX}{key_id}_{secrets.token_hex(NUM_SECRET_BYTES)}"


def new_key_id() -> str:
    """A name that no other key has."""
    return secrets.token_hex(NUM_ID_BYTES)


def key_id_of(key: bytes) -> str | None:
    """The id in a key, None when it has not the form of one of ours."""
    match = _KEY.fullmatch(key)
    return None if match is None else match["key_id"].decode("ascii")


def key_sha256(key: str | bytes) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()
