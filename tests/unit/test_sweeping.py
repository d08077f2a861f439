"""Which replica a sweep takes, what it plans, and what a finished sweep says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.core.errors import NotFound, Unavailable
from serving.core.state import Model, Pool, Replica, ReplicaState, RoutingTable, Task
from tests.cells import make_cell
from workbench.config import Slo, load_config
from workbench.costs.table import DEFAULT_EXPIRES_IN_S
from workbench.stack.state import PoolFacts, ProcessRecord, StackState
from workbench.sweeps.cells import CellKind, Shape
from workbench.sweeps.finished import Sweep
from workbench.sweeps.on_stack import KEEP_CELLS_S, SweepRequest, choose_replica, describe, plan_of
from workbench.sweeps.run import SweepMode, SweepResult
from workbench.sync import run_sync

ROOT = Path(__file__).parents[2]
SMOL = Pool(
    pool_id="smollm2-135m-cpu",
    model="smollm2-135m",
    version="1",
    task=Task.GENERATE,
    hardware_class="cpu",
    usd_per_hour=0.04,
    max_model_len=2048,
    engine_fingerprint="e",
    hardware_fingerprint="h",
    replicas=(
        Replica("s-0", "http://s0", ReplicaState.DOWN),
        Replica("s-1", "http://s1", ReplicaState.RESERVED),
        Replica("s-2", "http://s2", ReplicaState.READY),
    ),
)
TABLE = RoutingTable(
    epoch=1,
    published_at_s=0.0,
    models=(Model("smollm2-135m", Task.GENERATE, "1", ("1", "2")),),
    pools=(
        replace(SMOL, pool_id="new", version="2", replicas=(Replica("n-0", "http://n0", ReplicaState.STARTING),)),
        SMOL,
    ),
)


def test_a_ready_replica_of_the_champion_is_taken_first() -> None:
    pool, replica = choose_replica(TABLE, "smollm2-135m")
    assert (pool.pool_id, replica.replica_id) == ("smollm2-135m-cpu", "s-2")
    assert choose_replica(TABLE, "smollm2-135m@1", "s-1")[1].replica_id == "s-1"


@pytest.mark.parametrize(
    ("model", "replica_id", "error", "says"),
    [
        ("nope", None, NotFound, "no pool serves model 'nope'; served are smollm2-135m"),
        ("smollm2-135m@3", None, NotFound, "no replica of smollm2-135m@3; smollm2-135m has n-0, s-0, s-1, s-2"),
        ("smollm2-135m", "n-0", NotFound, "no replica of n-0"),
        ("smollm2-135m", "s-0", Unavailable, "s-0 is down"),
        ("smollm2-135m@2", None, Unavailable, "n-0 is starting"),
    ],
)
def test_what_cannot_be_measured_is_named(
    model: str, replica_id: str | None, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        choose_replica(TABLE, model, replica_id)


def test_a_replica_is_described_by_what_the_stack_wrote_down() -> None:
    config = load_config(ROOT / "workbench.yaml", env={})
    nobody = ProcessRecord("supervisor", 1, 0, "")
    state = StackState(
        nobody, urls={"gateway": "http://g"}, pools={SMOL.pool_id: PoolFacts("/w", {}, {}, {"s-2": [1]})}
    )
    measured, weights = describe(config, state, SMOL, SMOL.replicas[2])
    assert (measured.cores, measured.gateway_url, measured.num_units, weights) == ((1,), "http://g", 1, Path("/w"))
    with pytest.raises(Unavailable, match="has not started it"):
        describe(config, StackState(nobody), SMOL, SMOL.replicas[2])


def test_a_model_of_the_hub_has_the_tokenizer_that_its_engine_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "workbench.yaml", env={})
    state = StackState(ProcessRecord("supervisor", 1, 0, ""), pools={SMOL.pool_id: PoolFacts(None, {}, {}, {})})
    with pytest.raises(Unavailable, match="give a folder with the model's tokenizer"):
        describe(config, state, SMOL, SMOL.replicas[2])
    of_the_hub = config.models["smollm2-135m"].model_copy(update={"source": "hf:org/name"})
    config = config.model_copy(update={"models": {**config.models, "smollm2-135m": of_the_hub}})
    monkeypatch.setattr("workbench.hub.tokenizer_folder", lambda source: Path("/cache") / source)
    assert describe(config, state, SMOL, SMOL.replicas[2])[1] == Path("/cache/hf:org/name")


def test_a_request_overrides_the_modes_plan_and_takes_the_classs_slo() -> None:
    config = load_config(ROOT / "workbench.yaml", env={})
    plan = plan_of(config, SweepRequest("m", SweepMode.FULL, (Shape(32, 8),), (2,)), SMOL)
    assert (plan.mode, plan.shapes, plan.concurrencies) == (SweepMode.FULL, (Shape(32, 8),), (2,))
    assert plan.slo.ttft_s == config.slo.of("cpu").ttft_p99_s
    assert len(plan_of(config, SweepRequest("m"), SMOL).concurrencies) > 1


def sweep_of(*cells: Any, mlflow_error: str | None = None) -> Sweep:
    run_ids = {} if mlflow_error else {c.measurement_id: f"run-{i}" for i, c in enumerate(cells)}
    result = SweepResult("d", Path("/r/d"), cells, None if mlflow_error else "parent", run_ids, mlflow_error)
    return Sweep(result, Slo(ttft_p99_s=5, tpot_p99_s=0.15, served_within_frac=0.99), hardware())


def hardware() -> Any:
    return load_config(ROOT / "workbench.yaml", env={}).hardware


def measured(concurrency: int, rate: float, good_frac: float) -> Any:
    metrics = {"output_tokens_per_s_per_gpu": rate, "slo_good_frac": good_frac}
    return make_cell(
        concurrency=concurrency, metrics=metrics, intervals={"output_tokens_per_s_per_gpu": (rate - 1, rate + 1)}
    )


PREFILL = make_cell(CellKind.PREFILL)


def test_the_conclusion_tells_the_most_the_slos_most_and_the_price() -> None:
    text = sweep_of(PREFILL, measured(1, 30.0, 1.0), measured(8, 160.0, 1.0), measured(32, 320.0, 0.5)).conclusion()
    assert "the most it gave: 320 output tokens/s a unit (95 % interval 319 to 321) at 32 in flight" in text
    assert "for 99.0% of requests): 160 output tokens/s a unit (95 % interval 159 to 161) at 8 in flight" in text
    assert "a million output tokens costs $" in text
    assert "at $0.04 an hour of cpu (" in text


def test_the_conclusion_says_what_does_not_count_and_what_is_pending() -> None:
    broken = make_cell(concurrency=2, invalid="warm: 40 % came from the cache")
    text = sweep_of(measured(32, 320.0, 0.5), broken, mlflow_error="MLflow does not answer").conclusion()
    assert "at no load measured" in text
    assert "mixed-64x32-c2 does not count: warm: 40 % came from the cache" in text
    assert "2 cells are not in MLflow yet: MLflow does not answer" in text
    assert "no cell gives a price: mixed-64x32-c32: not in MLflow yet" in text


def test_a_sweep_of_nothing_says_so() -> None:
    assert "no cell under load counts" in sweep_of().conclusion()
    with pytest.raises(ValueError, match="nothing was measured"):
        sweep_of().cost_table()


async def test_plain_calls_work_inside_a_running_loop_and_raise_what_the_work_raised() -> None:
    async def fine() -> int:
        return 7

    async def broken() -> int:
        raise NotFound("no such thing")

    assert run_sync(fine) == 7
    with pytest.raises(NotFound, match="no such thing"):
        run_sync(broken)


def test_kept_cells_are_measured_again_long_before_their_cost_rows_expire():
    assert KEEP_CELLS_S <= DEFAULT_EXPIRES_IN_S / 2
