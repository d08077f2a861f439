"""The release book against a real store: the control plane follows its own record, and what is forged is put back."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis.asyncio

from serving.clock import ManualClock
from serving.control.compose import Registered
from serving.control.release_desk import ReleaseDesk, ReleaseParts
from serving.control.release_events import ReleaseEvents
from serving.control.troubles import Troubles
from serving.core.approval import GATES, tags_of
from serving.core.errors import Unavailable
from serving.core.releases import Evidence, ReleaseBook, appointed, recorded
from serving.core.sequential import Verdict
from serving.store.leases import Lease, LeaseLost
from serving.store.releases import FileReleaseBook, StoreReleaseBook

DOCUMENT = b'{"verdict": "pass"}'
PASSED = dict.fromkeys(GATES, Verdict.PASS)
EVIDENCE = Evidence(
    "2", hashlib.sha256(DOCUMENT).hexdigest(), "run1", "gate/evidence.json", PASSED, "w2", ManualClock().now_s()
)
APPROVED = tags_of(EVIDENCE) | {"weights.digest": "w2", "approval": EVIDENCE.digest[:16]}


@dataclass
class Shown:
    """A registry that anybody can write to."""

    alias: str | None = "1"
    tags_of_version: dict[str, dict[str, str]] = field(
        default_factory=lambda: {"1": {"weights.digest": "w1"}, "2": {"weights.digest": "w2"}}
    )
    artifacts: dict[str, bytes] = field(default_factory=lambda: {"run1/gate/evidence.json": DOCUMENT})
    is_dead: bool = False
    refuses: bool = False
    registry: str = "first"

    def _ask(self, writes: bool = False) -> None:
        if self.is_dead or (writes and self.refuses):
            raise Unavailable("MLflow does not answer")

    def read(self) -> Registered:
        champions = {} if self.alias is None else {"m": self.alias}
        claims = {version: dict(tags) for version, tags in self.tags_of_version.items()}
        return Registered(champions, {"m": ("1", "2")}, {"m": claims}, self.registry)

    def said_champion(self, model: str) -> str | None:
        self._ask()
        return self.alias

    def set_champion(self, model: str, version: str) -> None:
        self._ask(writes=True)
        self.alias = version

    def tags(self, model: str, version: str) -> Mapping[str, str]:
        self._ask()
        return dict(self.tags_of_version[version])

    def write_tags(self, model: str, version: str, tags: Mapping[str, str | None]) -> None:
        self._ask(writes=True)
        there = self.tags_of_version[version] | dict(tags)
        self.tags_of_version[version] = {tag: value for tag, value in there.items() if value is not None}

    def artifact(self, run_id: str, path: str) -> bytes | None:
        self._ask()
        return self.artifacts.get(f"{run_id}/{path}")

    def write_artifact(self, run_id: str, path: str, data: bytes) -> None:
        self._ask(writes=True)
        self.artifacts[f"{run_id}/{path}"] = data


@dataclass
class Plane:
    """A desk with a lease, a registry that can be forged, and what people were told."""

    client: redis.asyncio.Redis
    folder: Path
    shown: Shown = field(default_factory=Shown)
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.lease = Lease(self.client, "control", 60.0)
        self.desk = self.restarted()

    def restarted(self) -> ReleaseDesk:
        events = ReleaseEvents(self.clock, self.folder / "releases.jsonl")
        parts = ReleaseParts(self.shown, events, path=self.folder / "releases.json", copies=self.folder / "evidence")
        self.desk = ReleaseDesk(self.client, self.lease, parts, self.clock, Troubles(logging.getLogger("test")))
        return self.desk

    async def round(self, found: Registered | None = None) -> str | None:
        """A round with all that it set off, and time passing; the champion that is served."""
        await self.lease.hold()
        after = await self.desk.step(found or self.shown.read())
        await self.desk.settled()
        self.clock.advance(6.0)
        assert after is not None
        return after.champions.get("m")

    def told(self) -> list[tuple[str, str]]:
        path = self.folder / "releases.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [(event["kind"], event["version"]) for event in events]

    async def record(self, evidence: Evidence = EVIDENCE) -> None:
        store = StoreReleaseBook(self.client)
        book = recorded(await store.read() or ReleaseBook(), "m", evidence)
        await store.publish(ReleaseBook(book.epoch + 1, 2.0, book.releases))


@pytest.fixture
async def plane(client: redis.asyncio.Redis, tmp_path: Path) -> AsyncIterator[Plane]:
    plane = Plane(client, tmp_path)
    yield plane
    await plane.desk.stop()


async def test_the_first_champion_is_taken_from_the_alias_once_and_a_forged_one_never(plane: Plane) -> None:
    assert await plane.round() == "1"
    plane.shown.alias = "2"
    assert await plane.round() == "1", "the record is followed"
    assert plane.shown.alias == "1", "and the alias put back"
    plane.shown.alias = None
    assert (await plane.round(), plane.shown.alias) == ("1", "1")
    plane.shown.alias = "2"
    assert (await plane.round(), plane.shown.alias) == ("1", "1")
    forged = ("alias_forged", "2")
    assert plane.told() == [("champion_appointed", "1"), forged, ("alias_forged", "1"), forged]


async def test_an_alias_forged_while_nobody_may_write_is_told_once_and_put_back_later(plane: Plane) -> None:
    await plane.round()
    plane.shown.alias, plane.shown.refuses = "2", True
    assert [await plane.round() for _ in range(3)] == ["1", "1", "1"]
    assert (plane.told()[1:], plane.shown.alias) == ([("alias_forged", "2")], "2")
    plane.shown.refuses = False
    await plane.round()
    assert plane.shown.alias == "1"


async def test_an_appointed_champion_counts_at_once_and_the_alias_follows_without_an_alarm(plane: Plane) -> None:
    await plane.round()
    plane.shown.is_dead = True
    stale = plane.shown.read()
    await plane.desk.appoint("m", "2", "rollout r1")
    assert [await plane.round(stale) for _ in range(2)] == ["2", "2"]
    plane.shown.is_dead = False
    assert (await plane.round(stale), plane.shown.alias) == ("2", "2")
    assert plane.told() == [("champion_appointed", "1"), ("champion_appointed", "2")]
    assert plane.desk.book.of("m").champion is not None
    assert plane.desk.book.of("m").champion.weights_digest == "w2"


async def test_the_record_outlives_the_store_and_the_control_plane(plane: Plane) -> None:
    await plane.round()
    await plane.desk.appoint("m", "2", "rollout r1")
    await plane.client.flushall()
    plane.shown.alias = "1"
    plane.restarted()
    assert [await plane.round(), await plane.round()] == ["2", "2"]
    assert await StoreReleaseBook(plane.client).read() == plane.desk.book
    (plane.folder / "releases.json").unlink()
    await plane.round()
    assert await FileReleaseBook(plane.folder / "releases.json").read() == plane.desk.book


async def test_a_registry_that_began_anew_has_nothing_of_the_old_ones_record(plane: Plane) -> None:
    await plane.record()
    await plane.round()
    await plane.desk.appoint("m", "2", "rollout r1")
    await plane.round()
    plane.shown = Shown(alias="1", registry="second", artifacts={})
    plane.shown.tags_of_version["2"]["weights.digest"] = "other weights of the same number"
    plane.restarted()
    assert [await plane.round() for _ in range(3)] == ["1", "1", "1"]
    assert plane.shown.tags_of_version["2"] == {"weights.digest": "other weights of the same number"}
    assert plane.desk.book.registry == "second" and plane.desk.book.of("m").evidence == ()
    assert [kind for kind, _ in plane.told()] == ["champion_appointed"] * 3


async def test_one_that_lost_the_lease_appoints_nobody(plane: Plane) -> None:
    await plane.round()
    await plane.client.delete(plane.lease.key)
    with pytest.raises(LeaseLost):
        await plane.desk.appoint("m", "2", "late")
    found = await StoreReleaseBook(plane.client).read()
    assert found is not None and found.of("m").champion is not None and found.of("m").champion.version == "1"


async def test_of_two_books_of_one_epoch_the_stores_counts(plane: Plane) -> None:
    await StoreReleaseBook(plane.client).publish(appointed(ReleaseBook(1), "m", "1", "w1", 0.0, "a"))
    await FileReleaseBook(plane.folder / "releases.json").publish(appointed(ReleaseBook(1), "m", "2", "w2", 0.0, "b"))
    assert [await plane.round(), await plane.round()] == ["1", "1"]
    assert (await FileReleaseBook(plane.folder / "releases.json").read()) == plane.desk.book


async def test_weights_of_the_champion_are_shown_as_recorded(plane: Plane) -> None:
    await plane.round()
    plane.shown.tags_of_version["1"]["weights.digest"] = "w9"
    await plane.round()
    assert plane.shown.tags_of_version["1"]["weights.digest"] == "w1"
    assert plane.told()[1:] == [("weights_changed", "1")]


async def test_recorded_evidence_is_shown_and_its_approval_counts(plane: Plane) -> None:
    await plane.round()
    await plane.record()
    await plane.round()
    assert plane.shown.tags_of_version["2"] == tags_of(EVIDENCE) | {"weights.digest": "w2"}
    plane.shown.tags_of_version["2"]["approval"] = EVIDENCE.digest[:16]
    found = plane.desk.judge.judge("m", "2")
    assert (found.verdict, found.is_approved) == (Verdict.PASS, True)
    await plane.round()
    assert plane.shown.tags_of_version["2"] == APPROVED
    assert plane.told() == [("champion_appointed", "1")]


@pytest.mark.parametrize(
    ("forged", "alarm"),
    [({"approval": "f" * 16}, "approval_wrong"), ({"gate.quality": "fail"}, "tags_changed")],
)
async def test_a_forged_tag_is_put_back_each_time(plane: Plane, forged: dict[str, str], alarm: str) -> None:
    await plane.record()
    await plane.round()
    right = dict(plane.shown.tags_of_version["2"])
    for number in (1, 2):
        plane.shown.tags_of_version["2"] |= forged
        for _ in range(3):
            await plane.round()
        assert plane.shown.tags_of_version["2"] == right
        assert [kind for kind, _ in plane.told()[1:]] == [alarm] * number


async def test_tags_that_came_with_a_version_count_for_nothing_and_go(plane: Plane) -> None:
    plane.shown.tags_of_version["2"] = dict(APPROVED)
    found = plane.desk.judge.judge("m", "2")
    assert (found.verdict, found.is_approved) == (Verdict.INCONCLUSIVE, False)
    await plane.round()
    assert (
        "approval" not in plane.shown.tags_of_version["2"] and "gate.evidence" not in plane.shown.tags_of_version["2"]
    )
    assert ("tags_unrecorded", "2") in plane.told()


async def test_evidence_overwritten_after_the_approval_is_put_back_and_the_approval_taken_away(plane: Plane) -> None:
    await plane.record()
    plane.shown.tags_of_version["2"]["approval"] = EVIDENCE.digest[:16]
    await plane.round()
    assert plane.desk.judge.judge("m", "2").is_approved
    plane.shown.artifacts["run1/gate/evidence.json"] = b'{"verdict": "pass", "by": "me"}'
    found = plane.desk.judge.judge("m", "2")
    assert (found.verdict, found.is_approved) == (Verdict.INCONCLUSIVE, False)
    assert plane.shown.artifacts["run1/gate/evidence.json"] == DOCUMENT
    assert ("evidence_changed", "2") in plane.told()
    found = plane.desk.judge.judge("m", "2")
    assert (found.verdict, found.is_approved) == (Verdict.PASS, False), "it is to be approved again"
