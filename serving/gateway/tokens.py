"""Tokens of issuers that we trust: JWTs signed with RS256 or ES256, checked whole, claim by claim.

    form       three parts, at most 8 KiB; header and claims JSON objects
    header     alg is one that the issuer may use; no key or address of one inside; nothing critical; typ a JWT's
    signature  by a key of the issuer's set that is for this algorithm (PyJWT and cryptography)
    claims     iss, aud, exp, iat, nbf, a longest lifetime, a tenant that we know, scopes

Issuer and audience choose the key; no other claim is looked at before the signature is right. No part of a token is
ever repeated in a message, nor kept as the cause of one: crash reports show causes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from serving.core.errors import Unauthorized
from serving.core.tenancy import Issuer, Principal, Scope, Tenant
from serving.store.jwks import VerifyKey

MAX_TOKEN_BYTES = 8192
MAX_TIME_S = 1e12
_TYPES = {"jwt", "at+jwt", "application/at+jwt"}
# Headers that bring a key, say where one is, or change what is signed: none of them is ever followed.
_REFUSED_HEADERS = frozenset({"jwk", "jku", "x5u", "x5c", "crit", "b64", "zip", "enc"})

_JWS = jwt.PyJWS(algorithms=["RS256", "ES256"])


class UnknownKeyId(Unauthorized):
    """The issuer's set as we have it holds no such key; a newer set may."""

    def __init__(self, issuer: Issuer) -> None:
        super().__init__("the token is signed with a key that its issuer does not publish")
        self.issuer = issuer


@dataclass(frozen=True, slots=True)
class Verified:
    """Whom a token speaks for, and until when it does (Unix seconds, leeway included)."""

    principal: Principal
    until_s: float


KeysOf = Callable[[Issuer], Sequence[VerifyKey]]


class TokenVerifier:
    """Verifies against the issuers and tenants of one directory.

    Args:
        issuers: those trusted.
        tenants: by id.
        keys_of: the keys of an issuer as known now.
    """

    def __init__(self, issuers: Sequence[Issuer], tenants: Mapping[str, Tenant], keys_of: KeysOf) -> None:
        self._issuers = tuple(issuers)
        self._tenants = tenants
        self._keys_of = keys_of

    def verify(self, token: bytes, now_s: float) -> Verified:
        """Whom the token speaks for at `now_s`.

        Raises:
            UnknownKeyId: it names a key that the issuer's set does not hold.
            Unauthorized: anything else is wrong with it.
        """
        header, claims = _read(token)
        issuer = self._issuer_of(claims)
        _check_header(header, issuer)
        key = self._key(header, issuer)
        _check_signature(token, key)
        until_s = _check_times(claims, issuer, now_s)
        principal = self._principal(claims, issuer, until_s)
        return Verified(principal, until_s)

    def _issuer_of(self, claims: Mapping[str, Any]) -> Issuer:
        name, audience = claims.get("iss"), claims.get("aud")
        known = [issuer for issuer in self._issuers if issuer.issuer == name]
        if not known:
            raise Unauthorized("the token's issuer is not trusted here")
        audiences = audience if isinstance(audience, list) else [audience]
        for issuer in known:
            if issuer.audience in audiences:
                return issuer
        raise Unauthorized("the token is for another audience")

    def _key(self, header: Mapping[str, Any], issuer: Issuer) -> VerifyKey:
        """The key that the header names; without a name the only one that fits."""
        kid = header.get("kid")
        fitting = [key for key in self._keys_of(issuer) if key.algorithm == header["alg"]]
        named = fitting if kid is None else [key for key in fitting if key.kid == kid]
        if len(named) != 1:
            raise UnknownKeyId(issuer)
        return named[0]

    def _principal(self, claims: Mapping[str, Any], issuer: Issuer, until_s: float) -> Principal:
        name = claims.get(issuer.tenant_claim)
        tenant = self._tenants.get(name) if isinstance(name, str) else None
        if tenant is None or tenant.disabled:
            raise Unauthorized(f"the token's claim {issuer.tenant_claim!r} names no tenant of this endpoint")
        return Principal(
            tenant=tenant,
            key_id=_subject_id(claims, issuer),
            scopes=_scopes(claims.get(issuer.scope_claim)),
            expires_at_s=until_s,
        )


def _read(token: bytes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Header and claims, before anything of them is trusted."""
    if len(token) > MAX_TOKEN_BYTES:
        raise Unauthorized(f"the token is over {MAX_TOKEN_BYTES} bytes")
    header = claims = None
    with contextlib.suppress(jwt.PyJWTError, ValueError, TypeError, RecursionError):
        read = _JWS.decode_complete(token, options={"verify_signature": False})
        header, claims = read["header"], json.loads(read["payload"])
    # Raised out here: what PyJWT and json raise holds pieces of the token, and would be this error's context.
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise Unauthorized("the token is no JWT")
    return header, claims


def _check_header(header: Mapping[str, Any], issuer: Issuer) -> None:
    if header.get("alg") not in issuer.algorithms:
        raise Unauthorized(f"the token is not signed with {' or '.join(issuer.algorithms)}")
    if _REFUSED_HEADERS & header.keys():
        raise Unauthorized("the token brings a key of its own or an extension; only the issuer's keys count")
    kind = header.get("typ", "JWT")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise Unauthorized("the token is of another type than JWT")
    if not isinstance(header.get("kid", ""), str):
        raise Unauthorized("the token's key id is no text")


def _check_signature(token: bytes, key: VerifyKey) -> None:
    is_right = False
    with contextlib.suppress(jwt.PyJWTError, ValueError, TypeError):
        _JWS.decode_complete(token, key.key, algorithms=[key.algorithm])
        is_right = True
    if not is_right:
        raise Unauthorized("the token's signature is not right")


def _check_times(claims: Mapping[str, Any], issuer: Issuer, now_s: float) -> float:
    """Until when it counts. By our clock, which tests own, and so not by PyJWT's."""
    exp, iat = _time(claims, "exp"), _time(claims, "iat")
    if now_s >= exp + issuer.leeway_s:
        raise Unauthorized("the token is expired")
    if iat > now_s + issuer.leeway_s:
        raise Unauthorized("the token is from the future")
    if "nbf" in claims and _time(claims, "nbf") > now_s + issuer.leeway_s:
        raise Unauthorized("the token is not valid yet")
    if not 0 <= exp - iat <= issuer.max_lifetime_s:
        raise Unauthorized(f"the token's lifetime is over {issuer.max_lifetime_s:g} s")
    return exp + issuer.leeway_s


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_TIME_S:
        raise Unauthorized(f"the token needs a time {name!r}")
    return float(value)


def _scopes(claim: object) -> frozenset[Scope]:
    """Those of ours that the claim names, in a text or a list; none when it names none."""
    names = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return frozenset(scope for scope in Scope if scope.value in names)


def _subject_id(claims: Mapping[str, Any], issuer: Issuer) -> str:
    """A name for who holds the token that is safe to log: a digest, for a subject may be somebody's address."""
    subject = next((claims[name] for name in ("sub", "client_id", "azp") if isinstance(claims.get(name), str)), "")
    return "jwt-" + hashlib.sha256(f"{issuer.issuer}\n{subject}".encode("utf-8", "replace")).hexdigest()[:16]
