"""Small fleets, requests and rows for tests of the core."""

from __future__ import annotations

from dataclasses import replace

from serving.core.fleet import Fleet
from serving.core.state import (
    CostRow,
    Model,
    Pool,
    Replica,
    ReplicaSnapshot,
    ReplicaState,
    RequestView,
    RoutingPolicy,
    RoutingTable,
    Task,
)

NOW_S = 1_000_000.0


def a_pool(pool_id: str, *replicas: Replica, **changes: object) -> Pool:
    pool = Pool(
        pool_id=pool_id,
        model="m",
        version="1",
        task=Task.GENERATE,
        hardware_class="cpu",
        usd_per_hour=1.0,
        max_model_len=2048,
        engine_fingerprint="engine",
        hardware_fingerprint="hardware",
        replicas=replicas,
    )
    return replace(pool, **changes)  # type: ignore[arg-type]


def a_replica(replica_id: str, state: ReplicaState = ReplicaState.READY) -> Replica:
    return Replica(replica_id, f"http://127.0.0.1/{replica_id}", state)


def a_row(**changes: object) -> CostRow:
    row = CostRow(
        model="m",
        version="1",
        task=Task.GENERATE,
        hardware_class="cpu",
        engine_fingerprint="engine",
        hardware_fingerprint="hardware",
        num_prompt_tokens=100,
        num_output_tokens=100,
        concurrency=1,
        output_tokens_per_s_per_gpu=50.0,
        prefill_tokens_per_s_per_gpu=500.0,
        ttft_p50_s=0.1,
        ttft_p99_s=0.2,
        tpot_p50_s=0.02,
        tpot_p99_s=0.03,
        usd_per_million_input_tokens=1.0,
        usd_per_million_cached_input_tokens=0.1,
        usd_per_million_output_tokens=10.0,
        provenance="measured",
        measured_at_s=NOW_S - 60.0,
        expires_at_s=NOW_S + 3600.0,
        mlflow_run_id="run",
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def a_table(*pools: Pool, epoch: int = 1, rows: tuple[CostRow, ...] = (), **policy: object) -> RoutingTable:
    versions = tuple(sorted({pool.version for pool in pools}))
    return RoutingTable(
        epoch=epoch,
        published_at_s=NOW_S,
        models=(Model("m", Task.GENERATE, versions[0] if versions else None, versions),),
        pools=pools,
        cost_rows=rows,
        policy=RoutingPolicy(**policy),  # type: ignore[arg-type]
    )


def a_fleet(*pools: Pool, **table: object) -> Fleet:
    fleet = Fleet()
    fleet.on_table(a_table(*pools, **table))  # type: ignore[arg-type]
    return fleet


def a_request(request_id: str = "r", **changes: object) -> RequestView:
    request = RequestView(request_id, "m", None, Task.GENERATE, num_prompt_tokens=100, expected_output_tokens=100)
    return replace(request, **changes)  # type: ignore[arg-type]


def a_snapshot(replica_id: str, **changes: object) -> ReplicaSnapshot:
    snapshot = ReplicaSnapshot(replica_id, NOW_S, 0, 0, 0.0, kv_cache_capacity_tokens=10_000)
    return replace(snapshot, **changes)  # type: ignore[arg-type]
