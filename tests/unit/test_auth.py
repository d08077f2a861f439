"""From the Authorization header to a principal: known, unknown, hostile, and when nobody can tell."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.clock import ManualClock
from serving.core.errors import ErrorCode, Unauthorized, Unavailable
from serving.core.tenancy import ApiKey, AuthMode, Issuer, Limits, Scope, Tenant, TenantDirectory
from serving.gateway import auth
from serving.gateway.auth import Authenticator
from serving.gateway.key_sets import KeySets
from serving.store.api_keys import key_sha256, new_key
from tests.issuers import AUDIENCE, NAME, Signer, b64, jwks
from tests.unit.fetches import Issuing, make_key_sets

ACME_KEY, LAB_KEY = new_key("acme0"), new_key("lab00")
SIGNER = Signer("ES256", "k1")


def kept(key: str, tenant_id: str) -> ApiKey:
    return ApiKey(key.split("_")[1], tenant_id, key_sha256(key), created_at_s=0.0)


ACME, LAB = kept(ACME_KEY, "acme"), kept(LAB_KEY, "lab")
DIRECTORY = TenantDirectory(
    epoch=1,
    published_at_s=0.0,
    tenants=(Tenant("acme", models=("m",)), Tenant("lab", models=("*",))),
    keys=(ACME, LAB),
    issuers=(Issuer(NAME, AUDIENCE, jwks=jwks(SIGNER.entry)),),
)


class Door:
    """An authenticator, its clock, and the issuer's keys as it fetches them."""

    def __init__(self, mode: AuthMode = AuthMode.REQUIRED, directory: TenantDirectory = DIRECTORY) -> None:
        self.clock = ManualClock()
        self.issuing = Issuing()
        self.key_sets: KeySets = make_key_sets(self.clock, self.issuing, lambda: self.auth.forget())
        self.auth = Authenticator(mode, self.clock, key_sets=self.key_sets, max_staleness_s=100.0)
        self.auth.on_directory(directory)
        self.auth.on_confirmed(self.clock.now_s())

    async def ask(self, credential: str | bytes) -> str:
        raw = credential.encode() if isinstance(credential, str) else credential
        return (await self.auth.authenticate(b"Bearer " + raw)).tenant.tenant_id

    async def refused(self, header: bytes | None) -> str:
        with pytest.raises(Unauthorized) as error:
            await self.auth.authenticate(header)
        return error.value.message


async def test_a_key_speaks_for_its_own_tenant() -> None:
    door = Door()
    assert (await door.ask(ACME_KEY), await door.ask(LAB_KEY)) == ("acme", "lab")
    principal = await door.auth.authenticate(f"bearer   {ACME_KEY} ".encode())
    assert (principal.key_id, principal.is_admin) == ("acme0", False)


async def test_who_came_before_is_known_until_the_directory_changes() -> None:
    door = Door()
    header = f"Bearer {ACME_KEY}".encode()
    assert door.auth.find(header) is None
    principal = await door.auth.authenticate(header)
    assert door.auth.find(header) is principal
    door.auth.on_directory(replace(DIRECTORY, epoch=2))
    assert door.auth.find(header) is None


async def test_the_key_of_another_tenant_is_no_use_with_ones_own_id() -> None:
    stolen = f"wb_acme0_{LAB_KEY.split('_')[2]}"
    assert "not valid" in await Door().refused(b"Bearer " + stolen.encode())


@pytest.mark.parametrize(
    "changed",
    [
        replace(DIRECTORY, keys=(replace(ACME, revoked_at_s=1.0), LAB)),
        replace(DIRECTORY, keys=(LAB,)),
        replace(DIRECTORY, keys=(replace(ACME, expires_at_s=1.0), LAB)),
        replace(DIRECTORY, keys=(replace(ACME, sha256=LAB.sha256), LAB)),
        replace(DIRECTORY, keys=(replace(ACME, sha256="ä" * 64), LAB)),
        replace(DIRECTORY, tenants=(Tenant("acme", disabled=True), Tenant("lab"))),
        replace(DIRECTORY, tenants=(Tenant("lab"),)),
        TenantDirectory(2, 0.0),
    ],
)
async def test_what_ends_a_key_ends_it_for_those_who_were_known(changed: TenantDirectory) -> None:
    door = Door()
    await door.ask(ACME_KEY)
    door.auth.on_directory(changed)
    said = await door.refused(f"Bearer {ACME_KEY}".encode())
    assert said == "the API key is not valid: it is unknown, expired or revoked"  # the same for each cause


async def test_a_key_expires_while_it_is_known() -> None:
    door = Door()
    expires_at_s = door.clock.now_s() + 10.0
    door.auth.on_directory(replace(DIRECTORY, keys=(replace(ACME, expires_at_s=expires_at_s),)))
    await door.ask(ACME_KEY)
    door.clock.advance(9.9)
    await door.ask(ACME_KEY)
    door.clock.advance(0.1)
    assert "not valid" in await door.refused(f"Bearer {ACME_KEY}".encode())


async def test_a_key_narrows_what_its_tenant_may() -> None:
    narrow = replace(LAB, models=("n",), scopes=(Scope.ADMIN,), limits=Limits(max_streams=1))
    door = Door(directory=replace(DIRECTORY, keys=(narrow,)))
    principal = await door.auth.authenticate(f"Bearer {LAB_KEY}".encode())
    assert (principal.may_use("n"), principal.may_use("m")) == (True, False)
    assert (principal.scopes, principal.limits.max_streams) == ({Scope.ADMIN}, 1)


async def test_a_token_is_known_until_it_expires() -> None:
    door = Door()
    token = SIGNER.token(door.clock.now_s())
    assert await door.ask(token) == "acme"
    assert door.auth.find(b"Bearer " + token) is not None
    door.clock.advance(90.0)
    door.auth.on_confirmed(door.clock.now_s() + 600.0)
    door.clock.advance(600.0)
    assert door.auth.find(b"Bearer " + token) is None
    assert "expired" in await door.refused(b"Bearer " + token)


async def test_an_issuer_that_is_trusted_no_longer_is_refused_at_once() -> None:
    door = Door()
    token = SIGNER.token(door.clock.now_s())
    await door.ask(token)
    door.auth.on_directory(replace(DIRECTORY, issuers=()))
    await door.refused(b"Bearer " + token)


async def test_a_new_key_of_an_issuer_is_fetched_when_it_is_first_seen() -> None:
    url = "https://login.example.com/jwks.json"
    new = Signer("ES256", "k2", number=1)
    door = Door(directory=replace(DIRECTORY, issuers=(replace(DIRECTORY.issuers[0], jwks_url=url),)))
    door.issuing.answer = jwks(SIGNER.entry, new.entry)
    tokens = [new.token(door.clock.now_s(), sub=f"s{number}") for number in range(5)]
    assert await asyncio.gather(*(door.ask(token) for token in tokens)) == ["acme"] * 5
    assert door.issuing.asked == [url]  # once for all five
    unknown = Signer("ES256", "k3", number=2).token(door.clock.now_s())
    for _ in range(20):
        await door.refused(b"Bearer " + unknown)
    assert len(door.issuing.asked) == 1  # not again within 10 s
    door.clock.advance(10.0)
    await door.refused(b"Bearer " + unknown)
    assert len(door.issuing.asked) == 2


async def test_a_key_that_the_issuer_withdrew_is_refused_for_those_who_were_known() -> None:
    door = Door(directory=replace(DIRECTORY, issuers=(replace(DIRECTORY.issuers[0], jwks_url="https://i/"),)))
    token = SIGNER.token(door.clock.now_s())
    await door.ask(token)
    door.issuing.answer = jwks(Signer("ES256", "k2", number=1).entry)
    await door.key_sets.refresh(replace(DIRECTORY.issuers[0], jwks_url="https://i/"))
    await door.refused(b"Bearer " + token)


async def test_a_directory_that_nobody_confirms_lets_nobody_in_and_says_why() -> None:
    door = Door()
    await door.ask(ACME_KEY)
    door.clock.advance(100.0)
    assert door.auth.find(f"Bearer {ACME_KEY}".encode()) is None
    for credential in (ACME_KEY, new_key("nobody"), SIGNER.token(door.clock.now_s())):
        with pytest.raises(Unavailable) as error:
            await door.ask(credential)
        assert (error.value.code, error.value.retry_after_s) == (ErrorCode.STORE_UNAVAILABLE, 5.0)
    door.auth.on_confirmed(door.clock.now_s())
    assert await door.ask(ACME_KEY) == "acme"


async def test_before_the_first_directory_nobody_can_tell() -> None:
    clock = ManualClock()
    with pytest.raises(Unavailable):
        await Authenticator(AuthMode.REQUIRED, clock).authenticate(f"Bearer {ACME_KEY}".encode())


async def test_open_mode_lets_everybody_in_but_a_wrong_key() -> None:
    door = Door(AuthMode.OPEN)
    for header in (None, b"", b"Bearer not-needed", b"Basic YTpi"):
        assert (await door.auth.authenticate(header)).tenant is auth.OPEN_TENANT
    assert await door.ask(ACME_KEY) == "acme"
    await door.refused(b"Bearer " + new_key("nobody").encode())
    await door.refused(b"Bearer a.b.c")  # an issuer is trusted, so this is a token and a wrong one


async def test_open_mode_goes_by_the_directory_s_tenant_of_that_name() -> None:
    named = Tenant("default", models=("m",), limits=Limits(max_streams=2))
    door = Door(AuthMode.OPEN, replace(DIRECTORY, tenants=(*DIRECTORY.tenants, named)))
    assert (await door.auth.authenticate(None)).tenant == named
    door.auth.on_directory(replace(DIRECTORY, epoch=2, tenants=(replace(named, disabled=True),)))
    assert "no API key" in await door.refused(None)


async def test_what_is_required_is_required() -> None:
    door = Door()
    assert "send `Authorization: Bearer KEY`" in await door.refused(None)
    assert "send the key as" in await door.refused(ACME_KEY.encode())
    for header in (b"", b"Bearer", b"Bearer ", b"Basic YTpi", b"Bearer sk-something", f"Basic {ACME_KEY}".encode()):
        await door.refused(header)


async def test_memory_of_who_came_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_KNOWN", 3)
    door = Door()
    headers = [b"Bearer " + b" " * number + ACME_KEY.encode() for number in range(6)]
    for header in headers:
        await door.auth.authenticate(header)
    assert [door.auth.find(header) is not None for header in headers] == [False] * 3 + [True] * 3


# Pieces that come close to what is right, in any order, and bytes of any kind.
NOW_S = ManualClock().now_s()
GOOD_TOKEN = SIGNER.token(NOW_S)
NASTY: list[Any] = [None, True, 0, -1, 10**400, math.inf, math.nan, 1e308, "", "\0", "\ud800", "acme\n", "../k1"]
NASTY += [[], [[]], {}, ["b64"], ["acme"], {"k1": []}, {"kty": "oct", "k": "AA"}]
JSON = st.sampled_from(NASTY)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "alg": st.sampled_from(["RS256", "ES256", "HS256", "none", "ES512", ""]) | JSON,
        "kid": st.sampled_from(["k1", "k2", ""]) | JSON,
        "typ": st.sampled_from(["JWT", "at+jwt", "JOSE"]) | JSON,
        "b64": JSON,
        "crit": JSON,
        "jwk": JSON,
    },
)
CLAIMS = st.fixed_dictionaries(
    {},
    optional={
        "iss": st.just(NAME) | JSON,
        "aud": st.just(AUDIENCE) | JSON,
        "exp": st.just(int(NOW_S) + 60) | JSON,
        "iat": st.just(int(NOW_S)) | JSON,
        "tenant": st.just("acme") | JSON,
        "scope": JSON,
    },
)
PART = st.one_of(
    st.binary(max_size=40),
    st.builds(b64, st.binary(max_size=60)),
    st.builds(b64, HEADERS),
    st.builds(b64, CLAIMS),
    st.sampled_from(GOOD_TOKEN.split(b".")),
)
TOKEN = st.builds(lambda *parts: b".".join(parts), st.builds(b64, HEADERS), st.builds(b64, CLAIMS), PART)
KEY = st.builds(
    lambda key_id, secret, end: b"wb_" + key_id + b"_" + secret + end,
    st.sampled_from([b"acme0", b"lab00", b"nobody", b"", b"_", b"\xff"]),
    st.binary(max_size=60) | st.sampled_from([b"0" * 48, LAB_KEY.split("_")[2].encode()]),
    st.sampled_from([b"", b" ", b"\0", b"\n", b"\xc3"]),
)
SCHEME = st.sampled_from([b"Bearer ", b"bearer\t", b"BEARER  ", b"Basic ", b"", b"Bearer Bearer ", b" Bearer "])
CREDENTIAL = st.one_of(st.binary(max_size=80), KEY, TOKEN, st.lists(PART, min_size=1, max_size=5).map(b".".join))


@given(st.builds(lambda scheme, credential: scheme + credential, SCHEME, CREDENTIAL))
@settings(max_examples=2_000, deadline=None)
def test_no_hostile_header_lets_anybody_in_or_breaks_anything(header: bytes) -> None:
    door = HOSTED
    if LAB_KEY.encode() in header or GOOD_TOKEN in header:
        return
    with pytest.raises((Unauthorized, Unavailable)) as error:
        # Nothing is fetched here, so nothing is waited for: the first step is the last.
        door.auth.authenticate(header).send(None)
    assert error.value.__context__ is None
    assert door.auth.find(header) is None


HOSTED = Door()
HOSTED.auth.on_confirmed(math.inf)
