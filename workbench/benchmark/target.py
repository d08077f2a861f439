"""What a benchmark is pointed at: a model of the running stack, or any address that speaks the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from serving.core.errors import NotFound, Unavailable, UpstreamError
from serving.core.state import Pool, ReplicaState, RoutingTable, Task
from serving.engine.client import EngineClient
from serving.store.connection import connect
from serving.store.routing_table import StoreRoutingTable
from workbench.config import Slo as SloSettings
from workbench.config import WorkbenchConfig
from workbench.loadgen import Slo, SpecError, Target, TargetKind, Vocabulary, WorkloadError
from workbench.measurement.energy import EnergyMeter
from workbench.measurement.engine_window import offers_counters
from workbench.measurement.metered import meter_of
from workbench.sweeps.on_stack import choose_replica, describe
from workbench.wiring import NotRunning, running_stack

HUB = "hf:"
NO_TOKENIZER = "none"
ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Where a load goes, and what its figures need.

    Attributes:
        target: who answers.
        model: its name, for people and MLflow.
        vocabulary: of its tokenizer; None where there is none.
        frame_url, frame_model: whom to ask what the chat template adds.
        counter_urls: the engines whose counters belong to this load.
        cores: that the engine is pinned to.
        facts: what else it is known by; parameters in MLflow.
    """

    target: Target
    model: str
    vocabulary: Vocabulary | None
    frame_url: str
    frame_model: str
    counter_urls: tuple[str, ...]
    meter: EnergyMeter
    slo: Slo
    num_units: int = 1
    usd_per_hour: float | None = None
    cores: tuple[int, ...] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


async def on_stack(config: WorkbenchConfig, model: str, kind: TargetKind, *, slo: Slo | None = None) -> BenchTarget:
    """A model of the running stack, through the gateway or at one replica.

    Raises:
        NotRunning: no stack runs from this configuration.
        NotFound, Unavailable: no such model, or no replica of it is ready.
        WorkloadError: its tokenizer cannot be used.
    """
    state = running_stack(config)
    if state is None:
        raise NotRunning("a load needs a running stack: start it with `workbench up`, or name an endpoint with --url")
    async with aclosing(connect(state.urls["store"])) as store:
        table = await StoreRoutingTable(store).read()
    if table is None:
        raise Unavailable("no routing table is published yet: see `workbench status`")
    pool, chosen = choose_replica(table, model)
    measured, weights_path = describe(config, state, pool, chosen)
    to_engine = kind is TargetKind.ENGINE
    target = Target(
        measured.url if to_engine else state.urls["gateway"],
        measured.request_model if to_engine else f"{measured.model}@{measured.version}",
        measured.task,
        kind,
        measured.replica_id if to_engine else None,
    )
    hardware = config.hardware[pool.hardware_class]
    return BenchTarget(
        target=target,
        model=measured.model,
        vocabulary=Vocabulary.load(weights_path),
        frame_url=measured.url,
        frame_model=measured.request_model,
        counter_urls=(measured.url,) if to_engine else _replica_urls(table, pool),
        meter=meter_of(measured.url, pool.hardware_class, measured.num_units),
        slo=slo or slo_of(config.slo.of(pool.hardware_class)),
        num_units=measured.num_units,
        usd_per_hour=hardware.usd_per_hour * measured.num_units,
        cores=measured.cores,
        facts={
            "version": measured.version,
            "task": measured.task.value,
            "hardware_class": measured.hardware_class,
            "engine_fingerprint": measured.engine_fingerprint,
            "hardware_fingerprint": measured.hardware_fingerprint,
        },
    )


def slo_of(settings: SloSettings) -> Slo:
    """The limits of the configuration, as they are held against each request."""
    return Slo(settings.ttft_p99_s, settings.tpot_p99_s)


def _replica_urls(table: RoutingTable, pool: Pool) -> tuple[str, ...]:
    """All that may serve a request through the gateway."""
    pools = [one for one in table.pools if (one.model, one.version) == (pool.model, pool.version)]
    return tuple(r.url for one in pools for r in one.replicas if r.state is ReplicaState.READY)


async def at_url(
    url: str,
    model: str,
    task: Task,
    *,
    api_key: str | None = None,
    tokenizer: str | None = None,
    takes_extras: bool | None = None,
    slo: Slo | None = None,
    num_units: int = 1,
    usd_per_hour: float | None = None,
) -> BenchTarget:
    """An endpoint that speaks the OpenAI API.

    Args:
        url: with or without `/v1`.
        model: the name to send.
        task: what the workload asks for.
        api_key: sent as a bearer token.
        tokenizer: a folder with `tokenizer.json`, `hf:ORG/NAME`, or `none` for workloads of the user's own prompts.
        takes_extras: whether it takes vLLM's extras (ignore_eos, cache_salt); asked by its metrics when None.
        slo: what counts as good; the default SLO when None.
        num_units: GPUs behind it, for figures a GPU.
        usd_per_hour: what it costs, all units together; no price is given when None.

    Raises:
        SpecError: `url` is no address.
        Unavailable: nothing answers there, or it refuses the key.
        NotFound: it does not serve that model.
        WorkloadError: the tokenizer cannot be used.
    """
    base_url = base_of(url)
    vocabulary = load_vocabulary(tokenizer)
    await _check_model(base_url, model, api_key)
    has_counters = await offers_counters(base_url)
    target = Target(
        base_url,
        model,
        task,
        api_key=api_key,
        takes_extras=has_counters if takes_extras is None else takes_extras,
    )
    return BenchTarget(
        target=target,
        model=model,
        vocabulary=vocabulary,
        frame_url=base_url,
        frame_model=model,
        counter_urls=(base_url,) if has_counters else (),
        meter=meter_of(base_url, None, num_units),
        slo=slo or slo_of(SloSettings()),
        num_units=num_units,
        usd_per_hour=usd_per_hour,
        facts={"url": base_url, "task": task.value},
    )


def base_of(url: str) -> str:
    """The address without `/v1`.

    Raises:
        SpecError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SpecError(
            f"{url!r} is no address: give http://host:port or https://host, as the server's OpenAI base URL"
        )
    return url.rstrip("/").removesuffix("/v1")


def load_vocabulary(tokenizer: str | None) -> Vocabulary | None:
    """The words of a tokenizer; None for `none` and when nothing was said.

    Raises:
        WorkloadError: there is none in that folder.
        Unavailable: the hub has none.
    """
    if tokenizer is None or tokenizer == NO_TOKENIZER:
        return None
    if tokenizer.startswith(HUB):
        # Seconds to import, and only tokenizers of the hub need it.
        from workbench.hub import tokenizer_folder

        return Vocabulary.load(tokenizer_folder(tokenizer))
    path = Path(tokenizer).expanduser()
    return Vocabulary.load(path.parent if path.name == "tokenizer.json" else path)


async def _check_model(base_url: str, model: str, api_key: str | None) -> None:
    """Asks for the list of models; a server without one is believed.

    Raises:
        Unavailable, NotFound: as `at_url`.
    """
    headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode("ascii"))]
    try:
        async with EngineClient(base_url) as client:
            answer = await client.request("GET", "/v1/models", headers=headers, timeout_s=ASK_TIMEOUT_S)
            async with answer:
                body, status = await answer.read(), answer.status
    except UpstreamError as error:
        raise Unavailable(f"nothing answers at {base_url}: {error.message}") from error
    if status in (401, 403):
        raise Unavailable(f"{base_url} answered {status}: give the key's variable with --api-key-env")
    known = _models(body) if status == 200 else []
    if known and model not in known:
        raise NotFound(f"{base_url} serves no model {model!r}; it serves {', '.join(known)}")


def _models(body: bytes) -> list[str]:
    try:
        data: Any = orjson.loads(body)
        return [str(entry["id"]) for entry in data["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


def check_task(place: BenchTarget, task: Task) -> None:
    """Raises WorkloadError when the model does not do what the workload asks for."""
    if place.target.task is not task:
        raise WorkloadError(
            f"{place.model} is a model to {place.target.task.value}, and the workload is to {task.value}"
        )
