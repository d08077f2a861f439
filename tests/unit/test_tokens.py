"""Signed tokens: everything that is wrong with one is found, and nothing of it is repeated."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from serving.core.errors import Unauthorized
from serving.core.tenancy import Issuer, Scope, Tenant
from serving.gateway.tokens import MAX_TOKEN_BYTES, TokenVerifier, UnknownKeyId
from serving.store.jwks import VerifyKey, parse_jwks
from tests.issuers import AUDIENCE, NAME, Signer, b64, jwk, jwks

NOW_S = 1_700_000_000.0
RSA, EC = Signer("RS256", "rsa"), Signer("ES256", "ec")
STRANGER = Signer("RS256", "rsa", number=1)
TENANTS = {"acme": Tenant("acme", models=("m",)), "gone": Tenant("gone", disabled=True)}
ISSUER = Issuer(NAME, AUDIENCE, jwks=jwks(RSA.entry, EC.entry))


def verifier(*issuers: Issuer) -> TokenVerifier:
    def keys_of(issuer: Issuer) -> tuple[VerifyKey, ...]:
        return parse_jwks(issuer.jwks or "")

    return TokenVerifier(issuers or (ISSUER,), TENANTS, keys_of)


@pytest.mark.parametrize("signer", [RSA, EC])
def test_a_good_token_speaks_for_its_tenant(signer: Signer) -> None:
    verified = verifier().verify(signer.token(NOW_S, scope="inference admin other"), NOW_S)
    assert verified.principal.tenant.tenant_id == "acme"
    assert verified.principal.scopes == {Scope.INFERENCE, Scope.ADMIN}
    assert verified.until_s == NOW_S + 600 + ISSUER.leeway_s
    assert verified.principal.key_id.startswith("jwt-")
    assert "example.com" not in repr(verified)


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": ["elsewhere", AUDIENCE]},
        {"scope": ["inference"]},
        {"nbf": int(NOW_S) + 20},
        {"iat": int(NOW_S) + 20},
        {"iat": int(NOW_S) - 600, "exp": int(NOW_S) - 20},
        {"exp": NOW_S + 10.5},
        {"sub": None},
        {"iat": int(NOW_S), "exp": int(NOW_S) + 3600},
    ],
)
def test_a_token_that_is_right_within_what_is_allowed(changes: dict[str, Any]) -> None:
    assert verifier().verify(RSA.token(NOW_S, **changes), NOW_S).principal.tenant.tenant_id == "acme"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iat": int(NOW_S) - 600, "exp": int(NOW_S) - 30}, "expired"),
        ({"exp": None}, "'exp'"),
        ({"iat": None}, "'iat'"),
        ({"exp": "soon"}, "'exp'"),
        ({"exp": True}, "'exp'"),
        ({"exp": 10**400}, "'exp'"),
        ({"iat": -(10**400)}, "'iat'"),
        ({"exp": float("inf")}, "'exp'"),
        ({"iat": int(NOW_S) + 31}, "future"),
        ({"nbf": int(NOW_S) + 31}, "not valid yet"),
        ({"nbf": "later"}, "'nbf'"),
        ({"exp": int(NOW_S) + 3601}, "lifetime"),
        ({"iat": 0}, "lifetime"),
        ({"iat": int(NOW_S) + 20, "exp": int(NOW_S) + 10}, "lifetime"),
        ({"aud": "elsewhere"}, "audience"),
        ({"aud": ["elsewhere"]}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": {"workbench": 1}}, "audience"),
        ({"iss": "https://evil.example.com"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"iss": [NAME]}, "issuer"),
        ({"tenant": None}, "no tenant"),
        ({"tenant": "unknown"}, "no tenant"),
        ({"tenant": "gone"}, "no tenant"),
        ({"tenant": ["acme"]}, "no tenant"),
    ],
)
def test_a_wrong_claim_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Unauthorized, match=says):
        verifier().verify(RSA.token(NOW_S, **changes), NOW_S)


@pytest.mark.parametrize("scope", [None, "", "inferences", 7, {"inference": 1}, ["admins"]])
def test_a_token_without_a_scope_of_ours_may_do_nothing(scope: object) -> None:
    assert verifier().verify(RSA.token(NOW_S, scope=scope), NOW_S).principal.scopes == frozenset()


def claims() -> dict[str, Any]:
    times = {"iat": int(NOW_S), "exp": int(NOW_S) + 60}
    return {"iss": NAME, "aud": AUDIENCE, "tenant": "acme", "scope": "admin", **times}


def by_hand(header: dict[str, Any], sign: Callable[[bytes], bytes] = lambda signed: b"") -> bytes:
    signed = b64(header) + b"." + b64(claims())
    return signed + b"." + b64(sign(signed))


def hs256(secret: bytes) -> Callable[[bytes], bytes]:
    return lambda signed: hmac.new(secret, signed, hashlib.sha256).digest()


def public_pem() -> bytes:
    return RSA.key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def tampered(token: bytes, **changes: Any) -> bytes:
    header, payload, signature = token.split(b".")
    found = json.loads(base64.urlsafe_b64decode(payload + b"=="))
    return b".".join((header, b64({**found, **changes}), signature))


FORGED = {
    "alg none": by_hand({"alg": "none", "typ": "JWT"}),
    "alg None": by_hand({"alg": "None"}),
    "no alg": by_hand({"kid": "rsa"}),
    "alg a list": by_hand({"alg": ["RS256"], "kid": "rsa"}),
    "HS256 by the public key": by_hand({"alg": "HS256", "kid": "rsa"}, hs256(public_pem())),
    "RS256 said, HS256 done": by_hand({"alg": "RS256", "kid": "rsa"}, hs256(public_pem())),
    "ES256 of zeros": by_hand({"alg": "ES256", "kid": "ec"}, lambda signed: b"\0" * 64),
    "ES256 of nothing": by_hand({"alg": "ES256", "kid": "ec"}),
    "no signature": by_hand({"alg": "RS256", "kid": "rsa"}),
    "PS256": by_hand({"alg": "PS256", "kid": "rsa"}),
    "the other algorithm's key": by_hand({"alg": "ES256", "kid": "rsa"}),
    "another's key": STRANGER.token(NOW_S),
    "its own key in the header": STRANGER.token(NOW_S, header={"jwk": jwk(STRANGER.key, "rsa")}),
    "its own address of keys": STRANGER.token(NOW_S, header={"jku": "https://evil.example.com/jwks.json"}),
    "a right signature and a jku": RSA.token(NOW_S, header={"jku": "https://evil.example.com/jwks.json"}),
    "critical": RSA.token(NOW_S, header={"crit": ["b64"], "b64": True}),
    "typ of something else": RSA.token(NOW_S, header={"typ": "dpop+jwt"}),
    "typ a number": by_hand({"alg": "RS256", "kid": "rsa", "typ": 7}),
    "kid a number": by_hand({"alg": "RS256", "kid": 7}),
    "kid a path": by_hand({"alg": "RS256", "kid": "../../dev/null"}),
    "another tenant": tampered(RSA.token(NOW_S), tenant="lab"),
    "longer": tampered(RSA.token(NOW_S), exp=int(NOW_S) + 3000),
    "too long": RSA.token(NOW_S, filler="x" * MAX_TOKEN_BYTES),
    "nested": b64("[" * 4000) + b"." + b64("{}") + b".",
    "claims a list": b64({"alg": "RS256"}) + b"." + b64("[1]") + b".",
    "no base64": b"\xff.\xff.\xff",
    "empty": b"..",
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_token_is_refused_and_not_repeated(what: str) -> None:
    token = FORGED[what]
    with pytest.raises(Unauthorized) as refused:
        verifier().verify(token, NOW_S)
    assert refused.value.__context__ is None
    assert not any(part.decode("latin-1") in refused.value.message for part in token.split(b".") if len(part) > 8)


def test_a_key_that_the_set_lacks_is_told_apart() -> None:
    with pytest.raises(UnknownKeyId) as refused:
        verifier().verify(Signer("RS256", "new").token(NOW_S), NOW_S)
    assert refused.value.issuer == ISSUER


def test_without_a_key_id_the_only_key_counts_and_two_are_no_answer() -> None:
    token = Signer("RS256", None).token(NOW_S)
    assert verifier().verify(token, NOW_S).principal.tenant.tenant_id == "acme"
    two = replace(ISSUER, jwks=jwks(RSA.entry, Signer("RS256", "other", number=1).entry))
    with pytest.raises(UnknownKeyId):
        verifier(two).verify(token, NOW_S)


def test_an_issuer_uses_only_the_algorithms_that_it_was_given() -> None:
    only = replace(ISSUER, algorithms=("ES256",))
    assert verifier(only).verify(EC.token(NOW_S), NOW_S)
    with pytest.raises(Unauthorized, match="not signed with ES256"):
        verifier(only).verify(RSA.token(NOW_S), NOW_S)


def test_one_issuer_cannot_sign_for_another() -> None:
    mine = replace(ISSUER, issuer="https://other.example.com", jwks=jwks(Signer("RS256", "rsa", number=1).entry))
    both = verifier(ISSUER, mine)
    assert both.verify(STRANGER.token(NOW_S, iss=mine.issuer), NOW_S)
    with pytest.raises(Unauthorized, match="signature"):
        both.verify(STRANGER.token(NOW_S), NOW_S)


def test_claims_can_be_called_otherwise() -> None:
    named = replace(ISSUER, tenant_claim="https://example.com/org", scope_claim="permissions")
    token = RSA.token(NOW_S, **{"https://example.com/org": "acme", "tenant": "gone", "permissions": ["admin"]})
    verified = verifier(named).verify(token, NOW_S)
    assert verified.principal.scopes == {Scope.ADMIN}
