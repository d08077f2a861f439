"""Drift checks on the running stack: a replica is held, read, compared with a kept reference, and logged.

References lie below the data folder, by model, weights and engine. A replica that serves is not read: it is held
through a reservation first, as by a sweep, and given back after about a minute.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evals import readings
from evals.drift import ORDER, Drift, compare
from evals.drift_due import Checked, Due, due
from evals.readings import Reading, Reference
from serving.clock import SystemClock
from serving.core.errors import BadRequest, UpstreamError
from serving.engine.client import EngineClient
from serving.engine.scrape import scrape
from workbench.config import WorkbenchConfig
from workbench.sweeps.holds import StoreHold, owner_here
from workbench.sweeps.on_stack import FoundReplica, found_replica
from workbench.wiring import layout, mlflow_uri

EXPERIMENT = "evaluations/"


class DriftChecks:
    """Checks of one configuration's stack.

    Args:
        config: whose stack.
        log: whether results go to MLflow.
    """

    look_every_s = 5.0

    def __init__(self, config: WorkbenchConfig, *, log: bool) -> None:
        self._config = config
        self._log = log
        self._folder = layout(config).data_dir / "drift"
        self._clock = SystemClock()
        self._checked: dict[str, Checked] = {}

    async def take_reference(self, model: str, replica_id: str | None) -> Path:
        """Reads a replica twice and keeps that. Returns the file.

        Raises:
            NotRunning, NotFound, Unavailable, ReplicaReserved, NotHeld, UpstreamError: no replica could be read.
        """
        async with found_replica(self._config, model, replica_id) as found, self._held(found) as client:
            first, second = [await _read(found, client) for _ in range(2)]
        engine = found.replica
        reference = Reference(
            model=engine.model,
            model_digest=str(engine.engine_covers["weights_digest"]),
            engine=engine.engine_fingerprint,
            taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
            first=first,
            second=second,
            covers=dict(engine.engine_covers),
        )
        return readings.write(reference, self._folder)

    async def check(self, model: str, replica_id: str | None, reference: Path | None) -> dict[str, Any]:
        """Reads a replica once and compares. Returns a `Drift` as JSON, with what was compared with what.

        Raises:
            BadRequest: no reference, or one of other prompts.
            NotRunning, NotFound, Unavailable, ReplicaReserved, NotHeld, UpstreamError: no replica could be read.
            RegistryUnavailable, RegistryRefused: MLflow does not take the result.
        """
        async with found_replica(self._config, model, replica_id) as found:
            path = reference or self._reference_of(found)
            kept = readings.read(path)
            async with self._held(found) as client:
                reading = await _read(found, client)
            try:
                drift = compare(kept.first, kept.second, reading)
            except ValueError as error:
                raise BadRequest(f"{path}: {error}") from error
            engine = found.replica
        self._checked[engine.replica_id] = Checked(engine.engine_fingerprint, self._clock.monotonic_s())
        result = {
            **asdict(drift),
            "model": f"{engine.model}@{engine.version}",
            "replica": engine.replica_id,
            "engine": engine.engine_fingerprint,
            "checked_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "reference": str(path),
            "reference_taken_at": kept.taken_at,
            "reference_weights": kept.model_digest,
            "reference_engine": kept.engine,
        }
        _keep(result, checked_path(self._config, engine.model, engine.version, engine.engine_fingerprint))
        if self._log:
            result["mlflow_run_id"] = _log(mlflow_uri(self._config), drift, result)
        return result

    async def check_if_due(
        self, model: str, replica_id: str | None, reference: Path | None, every_s: float
    ) -> tuple[Due, dict[str, Any] | None]:
        """Checks when that is due, else says why not. Raises as `check`."""
        async with found_replica(self._config, model, replica_id) as found:
            chosen = found.replica
            is_idle = await _is_idle(chosen.url, chosen.replica_id, self._clock)
        decision = due(
            self._checked.get(chosen.replica_id),
            chosen.engine_fingerprint,
            is_idle=is_idle,
            now_s=self._clock.monotonic_s(),
            every_s=every_s,
        )
        return decision, await self.check(model, chosen.replica_id, reference) if decision.now else None

    def _reference_of(self, found: FoundReplica) -> Path:
        """That of the very engine, else the newest of the model's name."""
        engine = found.replica
        kept = sorted(self._folder.glob(f"{engine.model}-*.json"), key=lambda path: path.stat().st_mtime)
        own = [path for path in kept if path.stem.endswith(f"-{engine.engine_fingerprint[:16]}")]
        if not kept:
            raise BadRequest(
                f"no reference of {engine.model} yet: take one with `workbench drift {engine.model} --take-reference`"
            )
        return (own or kept)[-1]

    @asynccontextmanager
    async def _held(self, found: FoundReplica) -> AsyncIterator[EngineClient]:
        """The replica for us alone, with nothing running."""
        replica = found.replica
        owner = owner_here(f"drift check of {replica.model}")
        hold = StoreHold(found.store, found.tables, replica, owner=owner, clock=self._clock)
        async with hold.exclusive(), EngineClient(replica.url) as client:
            snapshot = await scrape(client, replica.replica_id, self._clock)
            if snapshot.num_running or snapshot.num_waiting:
                raise UpstreamError(f"{replica.replica_id} still serves {snapshot.num_running} requests: try again")
            yield client


def checked_path(config: WorkbenchConfig, model: str, version: str, engine: str) -> Path:
    """Where the last check of a version under an engine lies, whether or not it went to MLflow."""
    return layout(config).data_dir / "drift" / "checked" / f"{model}-v{version}-{engine[:16]}.json"


def _keep(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2), encoding="utf-8")
    partial.replace(path)


async def _is_idle(url: str, replica_id: str, clock: SystemClock) -> bool:
    async with EngineClient(url) as client:
        snapshot = await scrape(client, replica_id, clock)
        return not (snapshot.num_running or snapshot.num_waiting)


async def _read(found: FoundReplica, client: EngineClient) -> Reading:
    folder = found.tokenizer if found.tokenizer.is_dir() else None
    return await readings.take(client, found.replica.request_model, folder)


def _log(uri: str, drift: Drift, result: dict[str, Any]) -> str:
    # Seconds to import, and only what logs needs it.
    from workbench.tracking import Tracker

    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "drift.json"
        path.write_text(json.dumps(result, indent=2), encoding="utf-8")
        model = str(result["model"]).partition("@")[0]
        return Tracker(uri).log_run(
            EXPERIMENT + model,
            f"drift of {result['replica']}",
            tags={"kind": "drift", "drift.action": drift.action.value},
            params={name: result[name] for name in ("model", "replica", "engine", "reference_taken_at")},
            metrics={
                "drift/kl_mean": drift.kl_mean,
                "drift/kl_p": drift.kl_p,
                "drift/agreement_frac": drift.agreement_frac,
                "drift/action": ORDER.index(drift.action),
            },
            files={"drift": [path]},
        )
