"""What a simulated fleet is asked: a trace with a model and a tier drawn for each request, scaled to a rate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from serving.core.state import Tier
from workbench.loadgen.trace_files import read_trace
from workbench.loadgen.traces import TracedRequest
from workbench.sim.fleet import FleetSpec, TraceSpec
from workbench.sim.prefix_cache import Block

DEFAULT_BLOCK_TOKENS = 512
Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `num_output_tokens` is what it will say: only the engine and who knows everything may read it."""

    request_id: str
    at_s: float
    model: str
    tier: Tier
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and how many tokens a block of their prompts has."""

    name: str
    requests: tuple[SimRequest, ...]
    block_tokens: int

    def at_rate(self, rate_rps: float) -> Workload:
        """The same requests, their times scaled to a mean rate.

        Raises:
            ValueError: the rate is not above zero.
        """
        if not rate_rps > 0.0:
            raise ValueError(f"a rate must be above 0, not {rate_rps}")
        factor = len(self.requests) / rate_rps / max(self.requests[-1].at_s, 1e-9)
        return replace(self, requests=tuple(replace(r, at_s=r.at_s * factor) for r in self.requests))


def workload(fleet: FleetSpec, trace_name: str, seed: int, *, max_requests: int | None = None) -> Workload:
    """A trace of the fleet's: too long prompts are dropped, model and tier are drawn by their shares.

    Args:
        fleet: names the traces, the shares and the longest prompt.
        trace_name: one of its traces.
        seed: of the draws.
        max_requests: the first so many alone.

    Raises:
        ValueError: there is no such trace.
        TraceError: its file is not as promised.
    """
    if trace_name not in fleet.traces:
        raise ValueError(f"no trace {trace_name!r}; there are {', '.join(fleet.traces)}")
    spec = fleet.traces[trace_name]
    rng = random.Random(f"{trace_name}/{seed}")
    traced = _drawn(spec, rng) if spec.file is None else read_trace(_path(spec.file)).requests
    kept = [request for request in traced if 0 < request.num_prompt_tokens <= fleet.max_prompt_tokens][:max_requests]
    models, tiers = fleet.mix, {tier: of.share for tier, of in fleet.tiers.items()}
    requests = tuple(
        SimRequest(
            str(number),
            request.at_s,
            _draw(models, rng),
            _draw(tiers, rng),
            request.num_prompt_tokens,
            max(request.num_output_tokens, 1),
            request.block_ids if spec.prefixes == "hash_ids" else (),
        )
        for number, request in enumerate(kept)
    )
    return Workload(trace_name, requests, spec.block_tokens or DEFAULT_BLOCK_TOKENS)


def _path(name: str) -> Path:
    given = Path(name)
    return given if given.is_file() else Path(str(files("workbench").joinpath("data", name)))


def _draw(shares: dict[Name, float], rng: random.Random) -> Name:
    return rng.choices(list(shares), list(shares.values()))[0]


def _drawn(spec: TraceSpec, rng: random.Random) -> list[TracedRequest]:
    """Requests with exponential gaps of mean 1 s and uniform lengths."""
    if spec.requests is None or spec.prompt_tokens is None or spec.output_tokens is None:
        raise ValueError("a trace without a file needs requests, prompt_tokens and output_tokens")
    at_s, requests = 0.0, []
    for _ in range(spec.requests):
        at_s += rng.expovariate(1.0)
        prompt, output = rng.randint(*spec.prompt_tokens["uniform"]), rng.randint(*spec.output_tokens["uniform"])
        requests.append(TracedRequest(at_s, prompt, output))
    return requests
