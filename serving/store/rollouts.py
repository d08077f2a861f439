"""Rollouts in the store: the last one of each model, changed in one step, and what was observed of them.

A change names the revision that it rests on, so that of two who read the same state one is refused; one made by the
control plane names its lease too. Whatever fails in between, a rollout is as before or as after.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import redis.asyncio

from serving.core.canary import Observation
from serving.core.errors import NotFound, ServingError, StaleEpoch
from serving.core.policies.rollout import Rollout
from serving.store.connection import KEY_PREFIX, store_errors, text
from serving.store.documents import Codec
from serving.store.leases import FENCE, Lease, LeaseLost

ROLLOUTS_KEY = f"{KEY_PREFIX}rollouts"
WAITS_KEY = f"{KEY_PREFIX}rollout-waits"
MAX_OBSERVATIONS = 200_000
READ_AT_ONCE = 5_000
OBSERVED_FOR_S = 30 * 86_400
RATED_FOR_S = 86_400
MAX_TRIES = 5

_ROLLOUT = Codec(Rollout, "rollout")
_OBSERVATION = Codec(Observation, "observation")

# KEYS[2] the hash of rollouts; ARGV[2] model, [3] the revision that has to be there (0: none running), [4] the rollout.
_SAVE = """
local found = redis.call('HGET', KEYS[2], ARGV[2])
local there = found and cjson.decode(found) or nil
if ARGV[3] == '0' then
  if there and there.phase ~= 'promoted' and there.phase ~= 'rolled_back' then return 'running' end
elseif not there or there.rollout_id ~= ARGV[5] or tostring(there.revision) ~= ARGV[3] then
  return 'changed'
end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[4])
return 'ok'
"""


@dataclass(frozen=True, slots=True)
class Rated:
    """A request that may be rated: whose, by which version it was served, and in which rollout."""

    tenant_id: str
    request_id: str
    rollout_id: str
    version: str
    session: str


_RATED = Codec(Rated, "request to rate")


class RolloutRuns(ServingError):
    """The model has a rollout already; it must end first."""

    status = 409


class Rollouts:
    """Every method raises StoreUnavailable when the store does not answer, BrokenDocument for what it cannot read."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def all(self) -> dict[str, Rollout]:
        """The last rollout of each model, running or over."""
        with store_errors("read the rollouts"):
            found = await self._client.hgetall(ROLLOUTS_KEY)
        return {text(model): _ROLLOUT.decode(data) for model, data in found.items()}

    async def begin(self, rollout: Rollout) -> None:
        """Starts a rollout. Raises RolloutRuns when the model has one that is not over."""
        if await self._save(rollout, 0, None) != "ok":
            raise RolloutRuns(
                f"a rollout of {rollout.model} runs already: workbench canary status, or rollback to end it"
            )

    async def save(self, rollout: Rollout, lease: Lease) -> None:
        """Replaces the revision before. Raises LeaseLost, StaleEpoch; nothing was written then."""
        answer = await self._save(rollout, rollout.revision - 1, lease)
        if answer == "lost":
            raise LeaseLost(f"the lease was lost: {rollout.model} stays as it was")
        if answer != "ok":
            raise StaleEpoch(f"the rollout of {rollout.model} was changed meanwhile; reading it again")

    async def edit(self, model: str, change: Callable[[Rollout], Rollout]) -> Rollout:
        """Changes the model's rollout by a person's word; the rollout after it.

        Args:
            model: whose.
            change: gives the new one; may raise what the caller is to hear.

        Raises:
            NotFound: the model never had one.
            StaleEpoch: it went on changing under our hands.
        """
        for _ in range(MAX_TRIES):
            there = (await self.all()).get(model)
            if there is None:
                raise NotFound(f"no rollout of {model}: workbench canary start {model}@VERSION")
            wanted = replace(change(there), revision=there.revision + 1)
            if await self._save(wanted, there.revision, None) == "ok":
                return wanted
        raise StaleEpoch(f"the rollout of {model} keeps changing; try again")

    async def observe(self, rollout_id: str, seen: list[Observation]) -> None:
        """Adds observations at the end of the rollout's stream, in one round trip."""
        key = _stream(rollout_id)
        with store_errors("keep what was observed of a rollout"):
            async with self._client.pipeline(transaction=False) as pipe:
                for one in seen:
                    data = {"seen": _OBSERVATION.encode(one)}
                    pipe.xadd(key, cast(Any, data), maxlen=MAX_OBSERVATIONS, approximate=True)
                pipe.expire(key, OBSERVED_FOR_S)
                await pipe.execute()

    async def observed(self, rollout_id: str, after: str) -> tuple[str, list[Observation]]:
        """Observations after the one of that id ("0" is before the first), and the id of the last."""
        with store_errors("read what was observed of a rollout"):
            found = await self._client.xrange(_stream(rollout_id), f"({after}", "+", count=READ_AT_ONCE)
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", found)
        for entry_id, _ in entries:
            after = text(entry_id)
        return after, [_OBSERVATION.decode(fields[b"seen"]) for _, fields in entries]

    async def tell_waits(self, rollout_id: str, waits_for: tuple[str, ...]) -> None:
        """Tells people what a rollout waits for."""
        with store_errors("tell what a rollout waits for"):
            await self._client.hset(WAITS_KEY, rollout_id, json.dumps(waits_for))

    async def waits(self) -> dict[str, tuple[str, ...]]:
        """What each rollout was last said to wait for, by its id."""
        with store_errors("read what rollouts wait for"):
            found = await self._client.hgetall(WAITS_KEY)
        return {text(rollout_id): tuple(json.loads(waits)) for rollout_id, waits in found.items()}

    async def allow_ratings(self, rated: list[Rated]) -> None:
        """Remembers requests for `RATED_FOR_S`, in one round trip, so that their tenants may rate them once."""
        if not rated:
            return
        with store_errors("remember what may be rated"):
            async with self._client.pipeline(transaction=False) as pipe:
                for one in rated:
                    pipe.set(_rating(one.tenant_id, one.request_id), _RATED.encode(one), ex=RATED_FOR_S)
                await pipe.execute()

    async def take_rated(self, tenant_id: str, request_id: str) -> Rated | None:
        """The request, once; None when the tenant has none of that name to rate."""
        with store_errors("look up what is rated"):
            found = await self._client.getdel(_rating(tenant_id, request_id))
        return None if found is None else _RATED.decode(found)

    async def _save(self, rollout: Rollout, revision: int, lease: Lease | None) -> str:
        data = _ROLLOUT.encode(rollout)
        script = _SAVE if lease is None else f"{FENCE}\n{_SAVE}"
        held = ("", "") if lease is None else (lease.key, lease.value or "")
        with store_errors("write a rollout"):
            answer = await self._client.eval(
                script, 2, held[0], ROLLOUTS_KEY, held[1], rollout.model, str(revision), data, rollout.rollout_id
            )
        return text(cast("bytes | str", answer))


def _stream(rollout_id: str) -> str:
    return f"{KEY_PREFIX}observations:{rollout_id}"


def _rating(tenant_id: str, request_id: str) -> str:
    return f"{KEY_PREFIX}rating:{tenant_id}:{request_id}"
