"""A lease: one holder at a time, and a token by which its writes are told from those of one who lost it.

The holder's value holds the token, which rises with each holder. A script that writes on the holder's behalf compares
the value first (`FENCE`): whoever was stopped for longer than the lease lives finds its late writes refused.
"""

from __future__ import annotations

import secrets
from typing import cast

import redis.asyncio

from serving.core.errors import StaleEpoch
from serving.store.connection import KEY_PREFIX, store_errors, text

# KEYS[1] the lease, KEYS[2] the counter of tokens; ARGV nonce, milliseconds. Answers the holder's value or false.
_TAKE = """
local held = redis.call('GET', KEYS[1])
if held then return false end
local value = redis.call('INCR', KEYS[2]) .. ' ' .. ARGV[1]
redis.call('SET', KEYS[1], value, 'PX', ARGV[2])
return value
"""
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

FENCE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'lost' end"
"""The first line of a script that only the holder may run: KEYS[1] the lease, ARGV[1] the holder's value."""


class LeaseLost(StaleEpoch):
    """Another holds the lease now, or nobody does: what was to be written was not."""


class Lease:
    """Taken, renewed and given back by one process.

    Args:
        client: the store's.
        name: of what is leased.
        ttl_s: how long a holder that says nothing keeps it.
    """

    def __init__(self, client: redis.asyncio.Redis, name: str, ttl_s: float) -> None:
        self._client = client
        self.key = f"{KEY_PREFIX}lease:{name}"
        self._ttl_ms = int(ttl_s * 1000)
        self.value: str | None = None

    async def hold(self) -> bool:
        """Renews the lease, or takes it when it is free; whether it is held now. Raises StoreUnavailable."""
        with store_errors("hold a lease"):
            if self.value is not None:
                if await self._client.eval(_RENEW, 1, self.key, self.value, self._ttl_ms):
                    return True
                self.value = None
            nonce = secrets.token_hex(8)
            taken = await self._client.eval(_TAKE, 2, self.key, f"{self.key}:tokens", nonce, self._ttl_ms)
        self.value = None if taken is None else text(cast("bytes | str", taken))
        return self.value is not None

    async def release(self) -> None:
        """Gives it back; nothing happens when it is not ours. Raises StoreUnavailable."""
        if self.value is not None:
            with store_errors("release a lease"):
                await self._client.eval(_RELEASE, 1, self.key, self.value)
            self.value = None
