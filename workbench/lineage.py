"""From a version, or from one request, to all that it rests on: weights, measurements, verdict, approval, rollout, use.

    request    its usage event names model, version, replica and the cost table that priced it
    version    registry: weights, source, registration; release book: champion, recorded evidence
    measured   evaluations, cells and the last drift check that are kept here
    gate       the record in MLflow, read and hashed again
    served     sums over the usage spool

What could not be asked is named in `unknown`, never left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from serving.control.registry import Registry
from serving.core import gate_record
from serving.core.approval import TAG_APPROVAL, TAG_REJECTED
from serving.core.errors import NotFound
from serving.core.releases import ReleaseBook
from serving.metering.events import UsageEvent
from serving.metering.segments import read_events
from serving.store.connection import StoreUnavailable, connect
from workbench.config import WorkbenchConfig
from workbench.gates.kept import Kept
from workbench.releases import EVIDENCE_PATH, read_book
from workbench.rollouts import standings
from workbench.usage import summed, totals
from workbench.wiring import NotRunning, layout, store_url


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of one version; each part is plain JSON.

    Attributes:
        request: the usage event that was asked for; None where a version was.
        gate: of the record that the control plane goes by, else of the one that the tags name.
        approval: the tags as they stand; whether they count is the control plane's to say.
        rollout: the newest one of the model that this version is a part of.
        unknown: what could not be asked, and why.
    """

    model: str
    version: str
    registered: Mapping[str, Any]
    evaluations: list[dict[str, Any]]
    measurements: list[dict[str, Any]]
    drift: Mapping[str, Any] | None
    gate: Mapping[str, Any] | None
    approval: Mapping[str, str | None]
    rollout: Mapping[str, Any] | None
    served: Mapping[str, Any]
    request: Mapping[str, Any] | None = None
    unknown: tuple[str, ...] = ()


async def lineage(config: WorkbenchConfig, uri: str, reference: str) -> Lineage:
    """The lineage of MODEL, MODEL@VERSION or a request id.

    Args:
        config: whose data folder and store.
        uri: MLflow's.
        reference: a model's champion, a version, or a request by its `x-request-id`.

    Raises:
        NotFound: nothing goes by that name.
        RegistryUnavailable, RegistryRefused: MLflow is down, or said no.
        BadRequest, ResultsBroken: a kept file cannot be read.
    """
    registry, book = Registry(uri), await read_book(config)
    broken: list[str] = []
    spool = layout(config).usage_dir
    events = read_events(spool, lambda line: None)
    request = next((one for one in events if reference in (one.request_id, one.id)), None)
    model, version = (request.model, request.version) if request else _split(reference, book)
    if request is not None and not version:
        raise NotFound(f"request {reference} reached no version: it ended with status {request.status}")
    try:
        found = registry.get(model, version or None)
    except NotFound as error:
        raise NotFound(f"{error.message}; and no request {reference!r} in {spool}") from error
    kept = Kept(config, model, found.version, config.gates.suites)
    rollout, unknown = await _rollout(config, model, found.version)
    gate = _gate(registry, book, model, found.version, found.claims)
    champion = book.of(model).champion
    served = _served(
        one for one in read_events(spool, broken.append) if (one.model, one.version) == (model, found.version)
    )
    return Lineage(
        model=model,
        version=found.version,
        registered={
            "weights_digest": found.digest,
            "source": found.source,
            "registration_run_id": found.run_id,
            "is_champion": champion is not None and champion.version == found.version,
        },
        evaluations=[
            {
                "suite": one.suite,
                "started_at": one.started_at,
                "engine": one.engine,
                "accuracy": one.accuracy(),
                "mlflow_run_id": one.mlflow_run_id,
            }
            for one in kept.evaluations
        ],
        measurements=_measurements(kept),
        drift=None if (drift := kept.drift()) is None else dict(drift.found),
        gate=gate,
        approval={name: found.claims.get(name) for name in (TAG_APPROVAL, TAG_REJECTED)},
        rollout=rollout,
        served=served,
        request=None if request is None else asdict(request),
        unknown=(*unknown, *([f"{len(broken)} lines of the usage spool"] if broken else ())),
    )


def _split(reference: str, book: ReleaseBook) -> tuple[str, str | None]:
    model, _, version = reference.partition("@")
    champion = book.of(model).champion
    return model, version or (None if champion is None else champion.version)


def _measurements(kept: Kept) -> list[dict[str, Any]]:
    return [
        {
            "cell": one.result.spec.cell_id,
            "hardware_class": one.result.hardware_class,
            "ended_at": _iso(one.result.ended_at_s),
            "mlflow_run_id": one.mlflow_run_id,
        }
        for one in kept.cells()
    ]


def _gate(
    registry: Registry, book: ReleaseBook, model: str, version: str, claims: Mapping[str, str]
) -> dict[str, Any] | None:
    recorded = next(iter(book.of(model).evidence_of(version)), None)
    run_id = claims.get(gate_record.TAG_RUN) if recorded is None else recorded.run_id
    if run_id is None:
        return None
    data = registry.artifact(run_id, EVIDENCE_PATH if recorded is None else recorded.path)
    found: dict[str, Any] = {
        "mlflow_run_id": run_id,
        "recorded_digest": None if recorded is None else recorded.digest,
        "digest": None if data is None else gate_record.digest(data),
    }
    if data is None:
        return found | {"why": "its run no longer holds the record"}
    try:
        record = gate_record.read(data)
    except gate_record.BrokenRecord as error:
        return found | {"why": str(error)}
    said = record.verdicts()
    return found | {
        "verdict": said.verdict,
        "gates": {gate.value: one.verdict for gate, one in said.gates.items()},
        "champion": record.champion.version,
        "gathered_at": record.gathered_at,
        "policy": record.policy.digest,
        "sources": [asdict(one) for one in record.sources],
    }


async def _rollout(
    config: WorkbenchConfig, model: str, version: str
) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    try:
        async with aclosing(connect(store_url(config))) as client:
            found = await standings(client, model)
    except (NotRunning, StoreUnavailable) as error:
        return None, (f"rollouts: {error}",)
    own = [one for one in found if version in (one.rollout.stable, one.rollout.candidate)]
    if not own:
        return None, ()
    rollout = own[0].rollout
    return {
        "rollout_id": rollout.rollout_id,
        "part": "candidate" if rollout.candidate == version else "stable",
        "phase": rollout.phase,
        "share_frac": rollout.share_frac,
        "reason": rollout.reason,
        "started_at": _iso(rollout.started_at_s),
        "waits_for": list(own[0].waits_for),
    }, ()


def _served(events: Iterable[UsageEvent]) -> dict[str, Any]:
    """Sums, the first and last end of a request, and the cost tables that priced them."""
    ends_s: list[float] = []
    tables: set[str] = set()

    def noted() -> Iterator[UsageEvent]:
        for event in events:
            ends_s[:] = [min([*ends_s[:1], event.ended_at_s]), max([*ends_s[1:], event.ended_at_s])]
            tables.update(filter(None, [event.cost_table_run_id]))
            yield event

    sums = asdict(summed(totals(noted()).values()))
    first, last = map(_iso, ends_s) if ends_s else (None, None)
    return sums | {"first_at": first, "last_at": last, "cost_table_run_ids": sorted(tables)}


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")
