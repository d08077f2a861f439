"""Blocks of prompts whose keys and values a replica still holds: shared while in use, then evicted by age of use."""

from __future__ import annotations

from collections.abc import Sequence

Block = int | str


class PrefixCache:
    """Blocks by the id of all that lies before and in them. Sizes are in tokens.

    Attributes:
        used_tokens: of blocks that running requests hold; each counts once, however many share it.
        idle_tokens: of blocks that nobody holds; given back, the longest unused first, when room is needed.
    """

    __slots__ = ("_holders", "_idle", "block_tokens", "idle_tokens", "used_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.used_tokens = 0
        self.idle_tokens = 0
        self._holders: dict[Block, int] = {}
        self._idle: dict[Block, None] = {}  # the longest unused first

    def num_cached(self, blocks: Sequence[Block]) -> int:
        """How many of the first blocks are here."""
        holders, idle = self._holders, self._idle
        for number, block in enumerate(blocks):
            if block not in holders and block not in idle:
                return number
        return len(blocks)

    def idle_among(self, blocks: Sequence[Block]) -> int:
        """Tokens of those that nobody holds: taking them up takes as much away from what can be evicted."""
        return sum(block in self._idle for block in blocks) * self.block_tokens

    def hold(self, blocks: Sequence[Block]) -> None:
        """One more holder for each; blocks that are not here are added."""
        for block in blocks:
            held = self._holders.get(block, 0)
            self._holders[block] = held + 1
            if held:
                continue
            self.used_tokens += self.block_tokens
            if block in self._idle:
                del self._idle[block]
                self.idle_tokens -= self.block_tokens

    def release(self, blocks: Sequence[Block]) -> None:
        """One holder less for each, the last block first: a prefix outlives what follows it.

        Raises:
            KeyError: nobody holds a block.
        """
        for block in reversed(blocks):
            held = self._holders[block] - 1
            if held:
                self._holders[block] = held
                continue
            del self._holders[block]
            self._idle[block] = None
            self.used_tokens -= self.block_tokens
            self.idle_tokens += self.block_tokens

    def evict(self, num_tokens: int) -> None:
        """Gives back at least so many tokens, or all that nobody holds."""
        while num_tokens > 0 and self._idle:
            del self._idle[next(iter(self._idle))]
            self.idle_tokens -= self.block_tokens
            num_tokens -= self.block_tokens
