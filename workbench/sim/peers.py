"""Routers to be compared with: the rules of others, rebuilt. All see every replica of the model and count exactly.

RoundRobin       one after the other
LeastLoad        the fewest requests
PowerOfTwo       the fewer requests of two at random; as vllm-router's policy of that name
PrefixLoad       the share of the prompt that is there and the load, each in [0, 1], weighed 3 to 2 as llm-d's request
                 scheduler weighs prefix-cache hits and queue depth without a configuration of one's own
CacheAware       vllm-router's default: where most of the prompt is, if that is enough of it, else where the least
                 was sent; the fewest requests when load is uneven (0.1.17, its defaults)
ConsistentHash   vllm-router's, by the beginning of the prompt; prompts without blocks by their own id
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left

from serving.core.prefix_index import Prefix, PrefixIndex
from serving.core.state import ReplicaSnapshot
from workbench.sim.serving_fleet import ServingFleet
from workbench.sim.workload import SimRequest

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
POINTS_PER_REPLICA = 64
PREFIX_WEIGHT, LOAD_WEIGHT = 3.0, 2.0


class Peer:
    """What they share: requests counted from dispatch to the last token."""

    def __init__(self, fleet: ServingFleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(f"{type(self).__name__}/{seed}")
        self.load = dict.fromkeys(fleet.replicas, 0)
        self.names = {model: [r.replica_id for r in fleet.replicas_of(model)] for model in fleet.spec.pools}

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """The replica; none of them sheds."""
        raise NotImplementedError

    def on_dispatched(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """One more."""
        self.load[replica_id] += 1

    def on_first_token(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """None of them listens."""

    def on_finished(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """One less."""
        self.load[replica_id] -= 1

    def on_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """None of them listens."""

    def least(self, names: list[str]) -> str:
        """The one with the fewest requests; chance breaks ties."""
        fewest = min(self.load[name] for name in names)
        return self.rng.choice([name for name in names if self.load[name] == fewest])

    def prefix(self, request: SimRequest) -> Prefix:
        """The prompt's blocks."""
        return Prefix([hash((request.model, block)) for block in request.blocks], self.fleet.block_tokens)


class RoundRobin(Peer):
    """One after the other, each model for itself."""

    def __init__(self, fleet: ServingFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._next = dict.fromkeys(fleet.spec.pools, 0)

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """The next."""
        names = self.names[request.model]
        self._next[request.model] += 1
        return names[self._next[request.model] % len(names)]


class LeastLoad(Peer):
    """The fewest requests of all."""

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """Of all replicas of the model."""
        return self.least(self.names[request.model])


class PowerOfTwo(Peer):
    """The fewer requests of two."""

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """Of two different ones, where there are two."""
        names = self.names[request.model]
        return self.least(self.rng.sample(names, min(2, len(names))))


class PrefixPeer(Peer):
    """One that remembers what it sent where."""

    def __init__(self, fleet: ServingFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self.index = PrefixIndex()

    def on_dispatched(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """The replica holds the prompt from now on."""
        super().on_dispatched(replica_id, request, now_s)
        capacity = self.fleet.replicas[replica_id].engine.step_time.kv_capacity_tokens
        self.index.add(replica_id, self.prefix(request), capacity)


class PrefixLoad(PrefixPeer):
    """The best sum of both."""

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """Of all replicas of the model."""
        names, prefix = self.names[request.model], self.prefix(request)
        loads = [self.load[name] for name in names]
        most, least = max(loads), min(loads)

        def score(name: str) -> tuple[float, float]:
            held = min(self.index.num_tokens(name, prefix) / request.num_prompt_tokens, 1.0)
            free = (most - self.load[name]) / (most - least) if most > least else 1.0
            return PREFIX_WEIGHT * held + LOAD_WEIGHT * free, self.rng.random()

        return max(names, key=score)


class CacheAware(PrefixPeer):
    """Uneven load first, then the prompt, then the smallest tree."""

    def __init__(self, fleet: ServingFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._sent_tokens = dict.fromkeys(fleet.replicas, 0)

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """Of all replicas of the model."""
        names, prefix = self.names[request.model], self.prefix(request)
        loads = [self.load[name] for name in names]
        most, least = max(loads), min(loads)
        if most - least > BALANCE_ABS_THRESHOLD and most > least * BALANCE_REL_THRESHOLD:
            return self.least(names)
        holders = self.index.holders(prefix)
        if holders and holders[0].num_tokens / request.num_prompt_tokens > CACHE_THRESHOLD:
            return holders[0].replica_id
        return min(names, key=lambda name: self._sent_tokens[name])

    def on_dispatched(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """Its tree grows by what it did not hold."""
        held = self.index.num_tokens(replica_id, self.prefix(request))
        self._sent_tokens[replica_id] += max(request.num_prompt_tokens - held, 0)
        super().on_dispatched(replica_id, request, now_s)


class ConsistentHash(Peer):
    """A ring of points; a prompt goes to the first point after its hash."""

    def __init__(self, fleet: ServingFleet, seed: int) -> None:
        super().__init__(fleet, seed)
        self._rings = {
            model: sorted((_hash(f"{name}/{point}"), name) for name in names for point in range(POINTS_PER_REPLICA))
            for model, names in self.names.items()
        }

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """By the first blocks, which a conversation keeps."""
        key = "/".join(map(str, request.blocks[:2])) or request.request_id
        ring = self._rings[request.model]
        return ring[bisect_left(ring, (_hash(key), "")) % len(ring)][1]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


PEERS: dict[str, type[Peer]] = {
    "round robin": RoundRobin,
    "least load": LeastLoad,
    "prefix+load": PrefixLoad,
    "vllm-router power_of_two": PowerOfTwo,
    "vllm-router cache_aware": CacheAware,
    "vllm-router consistent_hash": ConsistentHash,
}
