"""What a sweep would measure, how long it would take and what that costs, without touching the replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.sweeps.cells import CellResult, CellSpec, MeasuredReplica
from workbench.sweeps.limits import CellEstimate, SweepLimits, estimates
from workbench.sweeps.plan import SweepPlan, sweep_digest
from workbench.sweeps.results import ResultsBroken, ResultsFolder, folders


@dataclass(frozen=True, slots=True)
class SweepPreview:
    """A sweep that was not run.

    Attributes:
        model: as it was asked for.
        replica_id: which would be measured.
        cores: that the replica is pinned to; empty when it is elsewhere.
        to_measure: cells that are missing, with what they will take.
        kept: cells that are there already.
        over_budget: of `to_measure`, those that the budget leaves to a later run.
        usd_per_s: price of the replica.
    """

    model: str
    replica_id: str
    cores: tuple[int, ...]
    to_measure: tuple[CellEstimate, ...]
    kept: tuple[CellSpec, ...]
    over_budget: tuple[CellEstimate, ...]
    usd_per_s: float

    @property
    def seconds(self) -> float:
        """Of what fits the budget. Stopping at saturation can only make it less."""
        left_out = {estimate.spec.cell_id for estimate in self.over_budget}
        return sum(one.seconds for one in self.to_measure if one.spec.cell_id not in left_out)

    @property
    def usd(self) -> float:
        """Money of those seconds."""
        return self.seconds * self.usd_per_s

    @property
    def num_assumed(self) -> int:
        """Cells whose time is assumed: nothing like them was measured."""
        return sum(one.is_assumed for one in self.to_measure)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        left_out = {one.spec.cell_id for one in self.over_budget}
        return {
            "model": self.model,
            "replica_id": self.replica_id,
            "cells": [
                {
                    "cell_id": one.spec.cell_id,
                    "num_requests": one.spec.num_requests,
                    "seconds": one.seconds,
                    "is_assumed": one.is_assumed,
                    "is_over_budget": one.spec.cell_id in left_out,
                }
                for one in self.to_measure
            ],
            "kept": [spec.cell_id for spec in self.kept],
            "minutes": self.seconds / 60,
            "usd": self.usd,
        }


def preview(
    model: str,
    plan: SweepPlan,
    replica: MeasuredReplica,
    results_dir: Path,
    limits: SweepLimits,
    *,
    max_age_s: float | None,
    now_s: float,
) -> SweepPreview:
    """What `run_sweep` would do with the same arguments now."""
    specs = plan.cells(with_gateway=replica.gateway_url is not None)
    folder = ResultsFolder(results_dir, sweep_digest(plan, replica))
    young = {
        cell.spec.cell_id
        for cell in folder.cells()
        if cell.invalid is None and (max_age_s is None or now_s - cell.ended_at_s < max_age_s)
    }
    missing = estimates((spec for spec in specs if spec.cell_id not in young), like(replica, results_dir))
    left_out = []
    spent_s = 0.0
    for one in missing:
        if limits.over_budget(spent_s, one) is not None:
            left_out.append(one)
        else:
            spent_s += one.seconds
    return SweepPreview(
        model,
        replica.replica_id,
        replica.cores or (),
        missing,
        tuple(spec for spec in specs if spec.cell_id in young),
        tuple(left_out),
        limits.usd_per_s,
    )


def like(replica: MeasuredReplica, results_dir: Path) -> Sequence[CellResult]:
    """Cells of any sweep of the same engine on the same hardware; folders that cannot be read count for nothing."""
    fingerprints = (replica.engine_fingerprint, replica.hardware_fingerprint)
    found: list[CellResult] = []
    for folder in folders(results_dir):
        with suppress(ResultsBroken):
            cells = folder.cells()
            found += [c for c in cells if (c.engine_fingerprint, c.hardware_fingerprint) == fingerprints]
    return found
