"""Issuers' key sets: what is taken from one, and when a worker asks for a newer one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.clock import ManualClock
from serving.core.tenancy import Issuer
from serving.gateway.key_sets import MIN_REFRESH_S, RETRY_S, TTL_S, KeySets
from serving.store.connection import BrokenDocument, StoreUnavailable
from serving.store.jwks import MAX_KEYS, in_one_order, parse_jwks
from tests.issuers import AUDIENCE, NAME, Signer, jwk, jwks
from tests.unit.fetches import Issuing, make_key_sets

ONE, TWO = Signer("ES256", "k1"), Signer("ES256", "k2", number=1)
RSA = Signer("RS256", "r1")
URL = "https://login.example.com/jwks.json"
ISSUER = Issuer(NAME, AUDIENCE, jwks_url=URL, jwks=jwks(ONE.entry))


def test_public_keys_for_signatures_are_taken() -> None:
    keys = parse_jwks(jwks(RSA.entry, ONE.entry, jwk(TWO.key, None)))
    assert [(key.kid, key.algorithm) for key in keys] == [("r1", "RS256"), ("k1", "ES256"), (None, "ES256")]


UNUSABLE: dict[str, dict[str, Any]] = {
    "for encryption": {**RSA.entry, "use": "enc"},
    "for another algorithm": {**RSA.entry, "alg": "RS512"},
    "the other kind's algorithm": {**RSA.entry, "alg": "HS256"},
    "another curve": jwk(ec.generate_private_key(ec.SECP384R1()), "k"),
    "too small": jwk(rsa.generate_private_key(public_exponent=65537, key_size=1024), "k"),
    "a kid that is no text": {**RSA.entry, "kid": 7},
    "not for verifying": {**RSA.entry, "key_ops": ["sign"]},
    "half a key": {"kty": "RSA", "n": RSA.entry["n"]},
    "a point off the curve": {**ONE.entry, "y": ONE.entry["x"]},
    "of no kind": {"kid": "k1"},
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_others_are_passed_over(what: str) -> None:
    assert [key.kid for key in parse_jwks(jwks(UNUSABLE[what], ONE.entry))] == ["k1"]
    with pytest.raises(BrokenDocument):
        parse_jwks(jwks(UNUSABLE[what]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"keys": {}}',
        '{"keys": []}',
        '{"keys": [1, null, "k"]}',
        "[" * 100_000,
        jwks(*[ONE.entry] * (MAX_KEYS + 1)),
        jwks(ONE.entry, {"kty": "oct", "k": "c2VjcmV0", "kid": "shared"}),
        jwks(ONE.entry, {**TWO.entry, "d": "c2VjcmV0"}),
    ],
)
def test_what_is_no_set_of_public_keys_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BrokenDocument) as refused:
        parse_jwks(text)
    assert "c2VjcmV0" not in refused.value.message


VALUES = st.sampled_from(
    [None, True, 7, "", "AQAB", "!", "A" * 400, [], {}, "RSA", "EC", "P-256", "secp256k1", "Ed25519"]
)
FIELDS = st.sampled_from(["kty", "n", "e", "x", "y", "crv", "kid", "alg", "use", "key_ops", "oth", "x5c"])


@given(st.sampled_from([RSA.entry, ONE.entry]), st.dictionaries(FIELDS, VALUES, max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_hostile_set_is_read_or_refused(entry: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        parse_jwks(jwks({**entry, **changes}))
    except BrokenDocument:
        return


def test_the_order_of_a_set_is_none() -> None:
    swapped = json.dumps({"keys": [dict(reversed(TWO.entry.items())), ONE.entry], "more": 1})
    assert in_one_order(swapped) == in_one_order(jwks(ONE.entry, TWO.entry))


class Worker:
    def __init__(self, *issuers: Issuer) -> None:
        self.clock = ManualClock()
        self.issuing = Issuing()
        self.num_changes = 0
        self.sets: KeySets = make_key_sets(self.clock, self.issuing, self._count)
        self.sets.on_issuers(issuers or (ISSUER,))

    def _count(self) -> None:
        self.num_changes += 1

    def kids(self, issuer: Issuer = ISSUER) -> list[str | None]:
        return [key.kid for key in self.sets.keys_of(issuer)]

    async def look(self) -> None:
        self.sets.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_the_directory_s_set_counts_before_anything_is_fetched() -> None:
    worker = Worker()
    assert (worker.kids(), worker.num_changes, worker.issuing.asked) == (["k1"], 1, [])


async def test_a_set_is_fetched_when_it_is_due_and_stands_when_it_cannot_be() -> None:
    worker = Worker()
    await worker.look()
    assert (worker.kids(), len(worker.issuing.asked)) == (["k1"], 1)  # nothing answered
    worker.clock.advance(RETRY_S * 1.25)
    worker.issuing.answer = jwks(ONE.entry, TWO.entry)
    await worker.look()
    assert (worker.kids(), worker.num_changes) == (["k1", "k2"], 2)
    worker.clock.advance(TTL_S * 0.74)
    await worker.look()
    assert len(worker.issuing.asked) == 2
    worker.clock.advance(TTL_S * 0.52)
    await worker.look()
    assert (len(worker.issuing.asked), worker.num_changes) == (3, 2)  # the same answer changes nothing


async def test_an_answer_that_is_broken_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    for answer in ("no JSON", BrokenDocument("key set: not JSON")):
        worker.issuing.answer = answer
        assert not await worker.sets.refresh(ISSUER)
        worker.clock.advance(MIN_REFRESH_S)
    assert worker.kids() == ["k1"]
    assert "stand as last known" in caplog.text


async def test_refreshing_is_shared_and_limited() -> None:
    worker = Worker()
    worker.issuing.answer = jwks(TWO.entry)
    assert await asyncio.gather(*(worker.sets.refresh(ISSUER) for _ in range(5))) == [True] * 5
    assert not await worker.sets.refresh(ISSUER)
    worker.clock.advance(MIN_REFRESH_S)
    assert not await worker.sets.refresh(ISSUER)  # asked again, and nothing is new
    assert len(worker.issuing.asked) == 2


async def test_who_waits_for_a_fetch_may_leave_without_ending_it() -> None:
    worker = Worker()
    worker.issuing.answer = jwks(TWO.entry)
    leaving = asyncio.create_task(worker.sets.refresh(ISSUER))
    staying = asyncio.create_task(worker.sets.refresh(ISSUER))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying
    assert worker.kids() == ["k2"]


async def test_a_set_without_an_address_is_never_fetched() -> None:
    issuer = replace(ISSUER, jwks_url=None)
    worker = Worker(issuer)
    await worker.look()
    assert not await worker.sets.refresh(issuer)
    assert not await worker.sets.refresh(ISSUER)  # an issuer that is not trusted
    assert worker.issuing.asked == []


async def test_a_directory_that_changes_something_else_leaves_what_was_fetched() -> None:
    worker = Worker()
    worker.issuing.answer = jwks(TWO.entry)
    await worker.sets.refresh(ISSUER)
    longer = replace(ISSUER, leeway_s=5.0)
    worker.sets.on_issuers((longer,))
    assert worker.kids(longer) == ["k2"]
    published = replace(longer, jwks=jwks(ONE.entry, TWO.entry))
    worker.sets.on_issuers((published,))
    assert worker.kids(published) == ["k1", "k2"]
    worker.sets.on_issuers(())
    assert worker.kids(published) == []


async def test_stopping_ends_a_fetch_that_hangs() -> None:
    begun = asyncio.Event()

    async def hang(url: str) -> str:
        begun.set()
        await asyncio.Event().wait()
        raise StoreUnavailable("never")

    worker = Worker()
    worker.issuing.fetch = hang  # type: ignore[method-assign]
    worker.sets = make_key_sets(worker.clock, worker.issuing, lambda: None)
    worker.sets.on_issuers((ISSUER,))
    worker.sets.look()
    await begun.wait()
    await asyncio.wait_for(worker.sets.stop(), 1.0)
