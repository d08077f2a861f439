"""Where rollouts stand, worked out from the store alone: what the control plane decided and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import redis.asyncio

from serving.core.canary import CanaryTests
from serving.core.family import SignalReport
from serving.core.policies.rollout import Rollout
from serving.store.rollouts import Rollouts


@dataclass(frozen=True, slots=True)
class Standing:
    """A rollout, what it waits for by the control plane's last word, and what was observed."""

    rollout: Rollout
    waits_for: tuple[str, ...]
    report: Mapping[str, SignalReport]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            **asdict(self.rollout),
            "share_frac": self.rollout.share_frac,
            "waits_for": list(self.waits_for),
            "signals": {name: asdict(signal) for name, signal in self.report.items()},
        }


async def standings(client: redis.asyncio.Redis, model: str | None = None) -> list[Standing]:
    """All rollouts, or that of one model, by name. Raises StoreUnavailable."""
    rollouts = Rollouts(client)
    found = await rollouts.all()
    waits = await rollouts.waits()
    chosen = [found[name] for name in sorted(found) if model in (None, name)]
    return [Standing(one, waits.get(one.rollout_id, ()), (await _tests(rollouts, one)).report()) for one in chosen]


async def _tests(rollouts: Rollouts, rollout: Rollout) -> CanaryTests:
    tests, after, seen = CanaryTests(rollout.stable, rollout.candidate), "0", None
    while seen is None or seen:
        after, seen = await rollouts.observed(rollout.rollout_id, after)
        for one in seen:
            tests.add(one)
    return tests
