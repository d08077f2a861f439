"""A replica's load, read from vLLM's Prometheus page (https://docs.vllm.ai/en/latest/design/metrics.html).

Series are added up over their labels, of which a replica with data-parallel engines has one set per engine; KV
usage is their mean.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from serving.core.errors import UpstreamError
from serving.core.ports import Clock
from serving.core.state import ReplicaSnapshot
from serving.engine.client import EngineClient
from serving.engine.errors import UnexpectedStatus

SCRAPE_TIMEOUT_S = 2.0
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_COUNTERS = {
    "num_prompt_tokens_total": "vllm:prompt_tokens_total",
    "num_output_tokens_total": "vllm:generation_tokens_total",
    "num_preemptions_total": "vllm:num_preemptions_total",
    "prefix_cache_queried_tokens_total": "vllm:prefix_cache_queries_total",
    "prefix_cache_hit_tokens_total": "vllm:prefix_cache_hits_total",
}
_CACHE_INFO = "vllm:cache_config_info"
_WANTED = frozenset({_RUNNING, _WAITING, _KV_USAGE, *_COUNTERS.values()})
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def scrape(client: EngineClient, replica_id: str, clock: Clock) -> ReplicaSnapshot:
    """Asks a replica for its metrics.

    `observed_at_s` is the time before asking: what is dispatched while the page is under way may then count twice,
    but is never lost.

    Raises:
        UpstreamError: the replica did not answer within `SCRAPE_TIMEOUT_S`, or not with vLLM's metrics.
    """
    observed_at_s = clock.now_s()
    async with await client.request("GET", "/metrics", timeout_s=SCRAPE_TIMEOUT_S) as response:
        body = await response.read()
    if response.status != 200:
        raise UnexpectedStatus(
            f"GET {client.base_url}/metrics answered {response.status}", engine_status=response.status, body=body
        )
    return parse_metrics(body.decode("utf-8", "replace"), replica_id, observed_at_s)


def parse_metrics(text: str, replica_id: str, observed_at_s: float) -> ReplicaSnapshot:
    """Reads a metrics page.

    Args:
        text: in Prometheus' text format.
        replica_id: put into the snapshot.
        observed_at_s: put into the snapshot.

    Raises:
        UpstreamError: a gauge that routing rests on is missing, or a value is no number.
    """
    samples, cache_infos = _read_samples(text, replica_id)
    for name in (_RUNNING, _WAITING, _KV_USAGE):
        if name not in samples:
            raise UpstreamError(f"metrics of {replica_id} lack {name}: is it a vLLM server?")
    try:
        counters: dict[str, Any] = {field: int(sum(samples.get(name, ()))) for field, name in _COUNTERS.items()}
        return ReplicaSnapshot(
            replica_id=replica_id,
            observed_at_s=observed_at_s,
            num_running=int(sum(samples[_RUNNING])),
            num_waiting=int(sum(samples[_WAITING])),
            kv_cache_usage_frac=_mean(samples[_KV_USAGE]),
            kv_cache_capacity_tokens=_capacity_tokens(cache_infos),
            **counters,
        )
    except (ValueError, OverflowError) as error:  # int(nan), int(inf)
        raise UpstreamError(f"metrics of {replica_id} hold a value that is no number: {error}") from error


def _read_samples(text: str, replica_id: str) -> tuple[dict[str, list[float]], list[dict[str, str]]]:
    samples: dict[str, list[float]] = defaultdict(list)
    cache_infos = []
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name in _WANTED:
            value = line[line.rfind("}") + 1 :].split() if "{" in line else line.split()[1:]
            try:
                samples[name].append(float(value[0]))
            except (IndexError, ValueError) as error:
                raise UpstreamError(f"metrics of {replica_id} hold a line that cannot be read: {line!r}") from error
        elif name == _CACHE_INFO:
            cache_infos.append(dict(_LABEL.findall(line)))
    return samples, cache_infos


def _mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    if mean != mean:
        raise ValueError("NaN")
    return mean


def _capacity_tokens(cache_infos: Sequence[dict[str, str]]) -> int | None:
    """Tokens that fit the KV cache; None when the engine doesn't say (it has no cache, or not yet)."""
    capacities = []
    for info in cache_infos:
        stated = info.get("kv_cache_size_tokens", "None")
        num_blocks, block_size = info.get("num_gpu_blocks", "None"), info.get("block_size", "None")
        if stated.isdecimal():  # exact where layers differ in what they cache, unlike the product below
            capacities.append(int(stated))
        elif num_blocks.isdecimal() and block_size.isdecimal():
            capacities.append(int(num_blocks) * int(block_size))
    return sum(capacities) if capacities else None
