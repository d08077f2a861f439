"""Which replicas likely still hold the beginning of a prompt: kept from what was sent to them, not asked of them.

    prefix     hashes of a prompt's blocks, each of all that lies before and in the block, so that equal hashes mean
               equal beginnings; keyed by tenant group, model, version and adapter, so that nothing is shared across
    add        a prompt was sent to a replica: it holds these blocks now
    holders    the replicas that hold the most of a prompt

A replica's blocks are bounded by what its KV cache holds and forgotten by age of use, the end of a prompt before its
beginning, as engines evict. The engine decides in truth: a wrong guess costs a prefill, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.core.values import value

MAX_HOLDERS = 8
DEFAULT_CAPACITY_TOKENS = 131_072
"""Of a replica that has not said how large its KV cache is."""


@value
class Prefix:
    """A prompt's full blocks, and how many tokens a block has (an estimate where blocks are of bytes)."""

    blocks: Sequence[int]
    block_tokens: float


@value
class Holder:
    """A replica and how many of the prompt's first tokens it likely holds."""

    replica_id: str
    num_tokens: int


class PrefixIndex:
    """Blocks by replica and replicas by block. An event costs as much as the prompt has blocks."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, None]] = {}  # of each replica, the longest unused first
        self._holders: dict[int, dict[str, None]] = {}  # of each block, the last used last

    def add(self, replica_id: str, prefix: Prefix, capacity_tokens: int | None) -> None:
        """The replica holds the prompt's blocks from now on; what exceeds its capacity is forgotten."""
        held = self._held.setdefault(replica_id, {})
        for block in reversed(prefix.blocks):  # the beginning is used last, so that it is forgotten last
            held.pop(block, None)
            held[block] = None
            holders = self._holders.setdefault(block, {})
            holders.pop(replica_id, None)
            holders[replica_id] = None
        most = int((capacity_tokens or DEFAULT_CAPACITY_TOKENS) / max(prefix.block_tokens, 1.0))
        while len(held) > most:
            self._drop(replica_id, next(iter(held)))

    def forget(self, replica_id: str) -> None:
        """The replica was restarted or removed: it holds nothing."""
        for block in list(self._held.get(replica_id, ())):
            self._drop(replica_id, block)
        self._held.pop(replica_id, None)

    def num_tokens(self, replica_id: str, prefix: Prefix) -> int:
        """How many of the prompt's first tokens that replica likely holds."""
        held, number = self._held.get(replica_id, {}), 0
        for block in prefix.blocks:
            if block not in held:
                break
            number += 1
        return int(number * prefix.block_tokens)

    def holders(self, prefix: Prefix) -> Sequence[Holder]:
        """Those that hold the most, the most recently used first among equals; `MAX_HOLDERS` at most."""
        found: list[Holder] = []
        named: set[str] = set()
        for depth in range(self._deepest(prefix.blocks), 0, -1):
            for replica_id in reversed(self._holders[prefix.blocks[depth - 1]]):
                if replica_id not in named:
                    named.add(replica_id)
                    found.append(Holder(replica_id, int(depth * prefix.block_tokens)))
                    if len(found) >= MAX_HOLDERS:
                        return found
        return found

    def _deepest(self, blocks: Sequence[int]) -> int:
        """How many first blocks somebody holds, by bisection: who holds a block holds those before it."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        return low

    def _drop(self, replica_id: str, block: int) -> None:
        del self._held[replica_id][block]
        holders = self._holders[block]
        del holders[replica_id]
        if not holders:
            del self._holders[block]

    @property
    def num_blocks(self) -> int:
        """Blocks of all replicas, each as often as it is held."""
        return sum(map(len, self._held.values()))
