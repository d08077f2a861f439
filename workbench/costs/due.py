"""Which pools are routed by load alone, because no cost row counts for them, and what to type to mend that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from serving.core.policies.cost import RowState, state_of
from serving.core.state import RoutingTable

PUBLISH = "workbench cost-table build --publish"
_WHY = {
    RowState.EXPIRED: "its rows have expired",
    RowState.MISMATCH: "its rows were measured on another engine, configuration or machine",
    RowState.UNMEASURED: "never measured",
}


@dataclass(frozen=True, slots=True)
class MeasurementDue:
    """A pool without a cost row that counts; `command` measures it, `PUBLISH` makes it count."""

    pool_id: str
    model: str
    version: str
    state: RowState
    why: str
    command: str


def measurements_due(table: RoutingTable, now_s: float) -> list[MeasurementDue]:
    """The pools that need a measurement, in the table's order."""
    num_pools = Counter((pool.model, pool.version) for pool in table.pools)
    found = []
    for pool in table.pools:
        state = state_of(table.cost_rows, pool, table.policy.provenances, now_s)
        if state is RowState.FRESH:
            continue
        command = f"workbench sweep {pool.model}@{pool.version}"
        if num_pools[pool.model, pool.version] > 1 and pool.replicas:
            command += f" --replica {pool.replicas[0].replica_id}"
        found.append(MeasurementDue(pool.pool_id, pool.model, pool.version, state, _WHY[state], command))
    return found
