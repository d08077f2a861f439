"""Keys, final answers, leases as a worker sees them, and what seals an answer."""

from __future__ import annotations

import random

import pytest

from serving.core.errors import BadRequest
from serving.core.policies.idempotency import DAY_S, ReplaySettings, StoreWatch, check_key, is_final
from serving.gateway.replay_seal import BrokenReplay, Head, Opener, Sealer, TenantKeys

RUN = b"r" * 16


@pytest.mark.parametrize("key", [b"a", b"!~", b"k" * 255, b"8e03978e-40d5-43e8-bc93-6894a57f9324"])
def test_keys(key: bytes):
    assert check_key(key) == key.decode()


@pytest.mark.parametrize("key", [b"", b"k" * 256, b"a b", b"\xc3\xa4", b"a\n", b"\x7f"])
def test_no_keys(key: bytes):
    with pytest.raises(BadRequest, match="visible ASCII"):
        check_key(key)


def test_an_error_frees_the_key():
    assert [status for status in (200, 201, 400, 404, 409, 422, 429, 499, 500, 502, 503, 504) if is_final(status)] == [
        200,
        201,
    ]


def test_content_goes_sooner_for_who_says_so():
    settings = ReplaySettings()
    assert [settings.content_kept_s(days) for days in (None, 30.0, 0.5)] == [DAY_S, DAY_S, DAY_S / 2]


def test_a_worker_takes_over_only_after_a_lease_without_a_gap():
    watch = StoreWatch(3.0)
    assert not watch.holds_lease(0.0)
    for second in range(3):
        watch.on_beat(float(second))
        assert not watch.may_take_over(second + 0.5)
    watch.on_beat(3.0)
    assert watch.may_take_over(3.0)
    assert not watch.may_take_over(5.0), "its own lease is not certain any more"
    watch.on_lost_beat()
    assert not watch.may_take_over(3.5)
    watch.on_beat(4.0)
    watch.on_beat(5.0)
    watch.on_beat(6.0)
    assert not watch.may_take_over(6.9)
    watch.on_beat(7.0)
    assert watch.may_take_over(7.0)
    watch.on_beat(9.5)
    assert not watch.may_take_over(9.6), "a gap: the others may have had one too"


def test_what_is_sealed_is_opened_part_by_part():
    rng = random.Random(1)
    keys = TenantKeys(b"secret")
    head = Head(200, True, [(b"content-type", b"text/event-stream"), (b"x-request-id", b"1"), (b"x-served-by", b"p")])
    pieces = [rng.randbytes(rng.randrange(2000)) for _ in range(20)]
    sealer, opener = Sealer(keys.of_run("t", b"salt", RUN)), Opener(keys.of_run("t", b"salt", RUN))
    parts = [sealer.part(data) for data in (head.encode() + pieces[0], *pieces[1:])]
    assert all(piece[:8] not in part for piece, part in zip(pieces, parts, strict=True) if len(piece) >= 8)
    assert opener.body(()) == b""
    assert opener.head is None
    assert b"".join([opener.body(parts[:1]), opener.body(parts[1:5]), opener.body(parts[5:])]) == b"".join(pieces)
    assert opener.head == Head(200, True, [head.headers[0], head.headers[2]])


@pytest.mark.parametrize(
    ("secret", "tenant", "salt", "run"),
    [
        (b"other", "t", b"salt", RUN),
        (b"secret", "u", b"salt", RUN),
        (b"secret", "t", b"sa1t", RUN),
        (b"secret", "t", b"salt", b"s" * 16),
    ],
)
def test_nobody_else_opens_it(secret: bytes, tenant: str, salt: bytes, run: bytes):
    part = Sealer(TenantKeys(b"secret").of_run("t", b"salt", RUN)).part(b"text")
    with pytest.raises(BrokenReplay):
        Opener(TenantKeys(secret).of_run(tenant, salt, run)).body([part])


def test_parts_are_bound_to_their_place():
    sealer = Sealer(TenantKeys(b"secret").of_run("t", b"salt", RUN))
    first, second = sealer.part(b"one"), sealer.part(b"two")
    for parts in ([second], [first, first], [second, first]):
        with pytest.raises(BrokenReplay):
            Opener(TenantKeys(b"secret").of_run("t", b"salt", RUN)).body(parts)


def test_a_streams_events_take_little():
    keys = TenantKeys(b"secret")
    sealer = Sealer(keys.of_run("t", b"salt", RUN))
    event = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":" %d"}}]}\n\n'
    parts = [b"".join(event % (token * 7919) for token in range(at, at + 10)) for at in range(0, 400, 10)]
    stored = sum(len(sealer.part(data)) for data in parts)
    assert stored * 8 < sum(map(len, parts))


def test_fingerprints_tell_apart_and_hide():
    print_of = TenantKeys(b"secret").fingerprint
    assert print_of(b"a", b"bc") == print_of(b"a", b"bc")
    assert len({print_of(b"a", b"bc"), print_of(b"ab", b"c"), print_of(b"abc")}) == 3
    assert TenantKeys(b"other").fingerprint(b"a", b"bc") != print_of(b"a", b"bc")
