"""An issuer of tokens: its keys, the set it publishes, and tokens right or wrong in any way that a test wants."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

NAME = "https://login.example.com"
AUDIENCE = "workbench"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


@cache
def private_key(algorithm: str, number: int = 0) -> PrivateKey:
    """The key of that number; the same one all through a run of the tests, for RSA keys take a while to make."""
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwk(key: PrivateKey, kid: str | None, **fields: Any) -> dict[str, Any]:
    """The public half as an entry of a key set."""
    if isinstance(key, rsa.RSAPrivateKey):
        entry = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        entry = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    entry.pop("key_ops", None)
    return entry | ({} if kid is None else {"kid": kid}) | fields


def jwks(*entries: dict[str, Any]) -> str:
    """A key set as an issuer publishes it."""
    return json.dumps({"keys": list(entries)})


@dataclass(frozen=True)
class Signer:
    """One of the issuer's keys."""

    algorithm: str = "RS256"
    kid: str | None = "k1"
    number: int = 0

    @property
    def key(self) -> PrivateKey:
        return private_key(self.algorithm, self.number)

    @property
    def entry(self) -> dict[str, Any]:
        return jwk(self.key, self.kid)

    def token(self, now_s: float, header: dict[str, Any] | None = None, **changes: Any) -> bytes:
        """A good token of tenant `acme` for ten minutes; a claim of None is left out."""
        claims = {
            "iss": NAME,
            "aud": AUDIENCE,
            "iat": int(now_s),
            "exp": int(now_s) + 600,
            "sub": "somebody@example.com",
            "tenant": "acme",
            "scope": "inference",
        }
        claims = {name: value for name, value in {**claims, **changes}.items() if value is not None}
        named = {} if self.kid is None else {"kid": self.kid}
        headers = {**named, **(header or {})}
        return jwt.PyJWS().encode(json.dumps(claims).encode(), self.key, self.algorithm, headers).encode()


def b64(data: bytes | str | dict[str, Any]) -> bytes:
    """base64url without padding, as the parts of a token are; a dict as JSON."""
    raw = json.dumps(data) if isinstance(data, dict) else data
    return base64.urlsafe_b64encode(raw.encode() if isinstance(raw, str) else raw).rstrip(b"=")
