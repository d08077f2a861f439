"""Idempotency keys in the store: who runs a request, and the sealed parts of its answer. One script a transition.

    record   hash   body (its fingerprint), state, worker, run, kept, until (its content's end), bytes, parts, claimed
    parts    list   sealed; with the record's `until` they go by themselves
    salt     text   of the tenant's key: without it what was stored can never be read again
    quota    hash   bytes of a tenant's parts, by the hour in which they end, and in all
    worker   text   there as long as a worker renews it: one call a heartbeat for all keys that it runs

`run` names one attempt, and is the fencing token: a script changes nothing when the record belongs to another run.
Scripts reach the owner's `worker` key, whose name is in the record, so the store is one primary, not a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from serving.store.connection import KEY_PREFIX
from serving.store.pipelined import Script

REPLAYS = f"{KEY_PREFIX}replays:"
_WORKER = f"{KEY_PREFIX}replay-worker:"

_COMMON = """
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function hour_of(ms) return string.format('%.0f', math.floor(ms / 3600000) + 1) end
-- Deletes an answer's parts and gives their bytes back.
local function free(record, parts, quota)
  local there = redis.call('HMGET', record, 'bytes', 'until')
  local hour = hour_of(tonumber(there[2] or '0'))
  if there[1] and there[1] ~= '0' and redis.call('HEXISTS', quota, hour) == 1 then
    redis.call('HINCRBY', quota, hour, -there[1])
    redis.call('HINCRBY', quota, 'all', -there[1])
  end
  redis.call('DEL', parts)
end
local function drop(record, parts, quota)
  free(record, parts, quota)
  redis.call('HSET', record, 'state', 'dropped', 'bytes', 0)
  return 'dropped'
end
"""

# KEYS record, parts, quota, salt; ARGV body, run, worker's key, its prefix, 1 to take over, 1 to keep the answer,
# ms of the record, ms of its content, a new salt. Answers {state, run, kept, salt, parts}.
_CLAIM = Script(
    _COMMON
    + """
local salt = redis.call('GET', KEYS[4])
if not salt and ARGV[6] == '1' then
  salt = ARGV[9]
  redis.call('SET', KEYS[4], salt)
end
salt = salt or ''
local there = redis.call('HMGET', KEYS[1], 'body', 'state', 'worker', 'run', 'kept', 'parts')
if there[1] then
  if there[1] ~= ARGV[1] then return {'reused'} end
  local dead = there[2] == 'running' and ARGV[5] == '1' and redis.call('EXISTS', ARGV[4] .. there[3]) == 0
  if not dead then
    local found = redis.call('LRANGE', KEYS[2], 0, -1)
    if there[2] == 'finished' and #found ~= tonumber(there[6]) then return {'dropped'} end
    return {there[2], there[4], there[5], salt, found}
  end
  free(KEYS[1], KEYS[2], KEYS[3])
  redis.call('DEL', KEYS[1])
end
local now = now_ms()
local ends = string.format('%.0f', now + ARGV[8])
redis.call('HSET', KEYS[1], 'body', ARGV[1], 'state', 'running', 'worker', ARGV[3], 'run', ARGV[2], 'kept', ARGV[6],
  'until', ends, 'bytes', 0, 'claimed', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ARGV[7])
if ARGV[6] == '1' then
  local hour = hour_of(now - 3600000)
  if redis.call('HGET', KEYS[3], 'pruned') ~= hour then
    local buckets = redis.call('HGETALL', KEYS[3])
    for i = 1, #buckets, 2 do
      local bucket = tonumber(buckets[i])
      if bucket and bucket <= tonumber(hour) then
        redis.call('HINCRBY', KEYS[3], 'all', -buckets[i + 1])
        redis.call('HDEL', KEYS[3], buckets[i])
      end
    end
    redis.call('HSET', KEYS[3], 'pruned', hour)
    redis.call('PEXPIRE', KEYS[3], ARGV[7] + 2 * 3600000)
  end
end
return {'owned', ARGV[2], ARGV[6], salt, {}}
"""
)

# KEYS record, parts, quota; ARGV run, index, 1 when it is the last, bytes an answer, bytes a tenant, part or ''.
# A part that is there already is not added again, so that a call without an answer can be repeated.
_APPEND = Script(
    _COMMON
    + """
local there = redis.call('HMGET', KEYS[1], 'run', 'state', 'bytes', 'until')
if there[1] ~= ARGV[1] then return 'gone' end
if there[2] ~= 'running' then return there[2] end
local index, size = tonumber(ARGV[2]), #ARGV[6]
local number = redis.call('LLEN', KEYS[2])
if number < index then return drop(KEYS[1], KEYS[2], KEYS[3]) end
if size > 0 and number == index then
  if there[3] + size > tonumber(ARGV[4]) then return drop(KEYS[1], KEYS[2], KEYS[3]) end
  if (redis.call('HGET', KEYS[3], 'all') or 0) + size > tonumber(ARGV[5]) then
    return drop(KEYS[1], KEYS[2], KEYS[3])
  end
  number = redis.call('RPUSH', KEYS[2], ARGV[6])
  if index == 0 then redis.call('PEXPIREAT', KEYS[2], there[4]) end
  redis.call('HINCRBY', KEYS[1], 'bytes', size)
  redis.call('HINCRBY', KEYS[3], hour_of(tonumber(there[4])), size)
  redis.call('HINCRBY', KEYS[3], 'all', size)
end
if ARGV[3] == '1' then
  redis.call('HSET', KEYS[1], 'state', 'finished', 'parts', number)
  return 'finished'
end
return 'running'
"""
)

# KEYS record, parts, quota; ARGV run, 1 to drop the answer, 0 to free the key.
_CLOSE = Script(
    _COMMON
    + """
local there = redis.call('HMGET', KEYS[1], 'run', 'state')
if there[1] ~= ARGV[1] then return 'gone' end
if there[2] ~= 'running' then return there[2] end
if ARGV[2] == '1' then return drop(KEYS[1], KEYS[2], KEYS[3]) end
free(KEYS[1], KEYS[2], KEYS[3])
redis.call('DEL', KEYS[1])
return 'gone'
"""
)

# KEYS record, parts; ARGV run, index of the first part wanted, the worker keys' prefix, 1 to see the dead.
_READ = Script(
    """
local there = redis.call('HMGET', KEYS[1], 'run', 'state', 'worker', 'parts')
if there[1] ~= ARGV[1] then return {'gone'} end
if there[2] == 'dropped' then return {'dropped'} end
if there[2] == 'running' and ARGV[4] == '1' and redis.call('EXISTS', ARGV[3] .. there[3]) == 0 then
  return {'dead'}
end
local number = redis.call('LLEN', KEYS[2])
if there[2] == 'finished' and number ~= tonumber(there[4]) then return {'dropped'} end
if number == tonumber(ARGV[2]) then return {there[2], {}} end
return {there[2], redis.call('LRANGE', KEYS[2], ARGV[2], -1)}
"""
)

# KEYS record, parts, quota; ARGV the least age in ms.
PURGE = (
    _COMMON
    + """
local there = redis.call('HMGET', KEYS[1], 'claimed', 'state', 'kept')
if not there[1] or there[2] == 'dropped' or there[3] ~= '1' then return 0 end
if now_ms() - there[1] < tonumber(ARGV[1]) then return 0 end
drop(KEYS[1], KEYS[2], KEYS[3])
return 1
"""
)


class RunState(StrEnum):
    """What a call found.

    `OWNED`: the key is the caller's now. `REUSED`: it came before with another body. `DROPPED`: its answer is not
    kept. `GONE`: the run is no more, the key is free or another run's. `DEAD`: the run's worker is.
    """

    OWNED = "owned"
    REUSED = "reused"
    RUNNING = "running"
    FINISHED = "finished"
    DROPPED = "dropped"
    GONE = "gone"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one key of one tenant is kept."""

    record: str
    parts: str
    quota: str
    salt: str

    @classmethod
    def of(cls, tenant_id: str, name: str) -> Place:
        """Of the key that `name` stands for: what clients call their keys is not stored."""
        folder = f"{REPLAYS}{tenant_id}:"
        return cls(f"{folder}record:{name}", f"{folder}parts:{name}", f"{folder}quota", f"{folder}salt")


@dataclass(frozen=True, slots=True)
class Claim:
    """What was found under a key. `parts` are all there are; the rest is empty for REUSED and DROPPED."""

    state: RunState
    run: bytes = b""
    kept: bool = False
    salt: bytes = b""
    parts: Sequence[bytes] = ()


class Pipe(Protocol):
    """What is needed of a connection to the store: a StorePipe."""

    async def call(self, *parts: Any) -> Any:
        """Raises StoreUnavailable."""
        ...

    async def script(self, script: Script, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        """Raises StoreUnavailable."""
        ...


class ReplayStore:
    """One worker's way to the keys. Every method raises StoreUnavailable."""

    def __init__(self, pipe: Pipe, worker: str, lease_s: float) -> None:
        """`worker` names this process; no other one ever had the name."""
        self._pipe = pipe
        self._worker = worker
        self._lease_ms = int(lease_s * 1000)

    async def beat(self) -> None:
        """Says that this worker is alive, for another lease."""
        await self._pipe.call("SET", _WORKER + self._worker, "1", "PX", self._lease_ms)

    async def leave(self) -> None:
        """Says that it is no more: what it still runs may be taken over at once."""
        await self._pipe.call("DEL", _WORKER + self._worker)

    async def claim(
        self,
        place: Place,
        *,
        body: bytes,
        run: bytes,
        new_salt: bytes,
        keeps: bool,
        kept_s: float,
        content_kept_s: float,
        may_take_over: bool,
    ) -> Claim:
        """Takes the key for `run` if nobody has it or its worker is dead, else tells what is there.

        Args:
            place: where.
            body: fingerprint of what is asked.
            run: name of the attempt, never used before.
            new_salt: the tenant's, if it has none.
            keeps: whether the answer will be stored.
            kept_s: for how long the key counts.
            content_kept_s: for how long its answer is stored.
            may_take_over: whether a lease that ran out means a dead worker.
        """
        answer = await self._pipe.script(
            _CLAIM,
            (place.record, place.parts, place.quota, place.salt),
            (
                *(body, run, self._worker, _WORKER, int(may_take_over), int(keeps)),
                *(int(kept_s * 1000), int(content_kept_s * 1000), new_salt),
            ),
        )
        state = RunState(answer[0].decode())
        if len(answer) == 1:
            return Claim(state)
        return Claim(state, answer[1], answer[2] == b"1", answer[3], answer[4])

    async def append(
        self, place: Place, run: bytes, index: int, part: bytes, *, last: bool, max_bytes: int, max_tenant_bytes: int
    ) -> RunState:
        """Adds a part (or none, `b""`), the `index`-th of its run. May be repeated when the answer was lost.

        Returns:
            RUNNING; FINISHED after the last part; DROPPED when it is too much, or was purged; GONE when the key
            is another run's.
        """
        args = (run, index, int(last), max_bytes, max_tenant_bytes, part)
        answer = await self._pipe.script(_APPEND, (place.record, place.parts, place.quota), args)
        return RunState(answer.decode())

    async def close(self, place: Place, run: bytes, *, drop: bool) -> None:
        """Ends a run without an answer to replay: `drop` keeps the key from running again, else it is free."""
        await self._pipe.script(_CLOSE, (place.record, place.parts, place.quota), (run, int(drop)))

    async def read(
        self, place: Place, run: bytes, index: int, *, may_take_over: bool
    ) -> tuple[RunState, Sequence[bytes]]:
        """How a run stands, and its parts from the `index`-th."""
        args = (run, index, _WORKER, int(may_take_over))
        answer = await self._pipe.script(_READ, (place.record, place.parts), args)
        return RunState(answer[0].decode()), answer[1] if len(answer) > 1 else ()
