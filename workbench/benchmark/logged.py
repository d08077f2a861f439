"""A benchmark in MLflow: a run that follows it while it is measured, and holds all of it afterwards."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from workbench import run_fields
from workbench.absent import Absent
from workbench.benchmark.request import BenchRequest
from workbench.benchmark.result import BenchResult
from workbench.loadgen import write_parquet
from workbench.tracking import Inputs, LiveRun, Tracker

RUN_KIND = "bench"
PAGE_FOLDER = "report"
RESULT_FILE, RECORDS_FILE = "bench.json", "records.parquet"


class Following:
    """Opens the run that follows a benchmark, and logs its result into it."""

    def __init__(self, tracker: Tracker, request: BenchRequest) -> None:
        self._tracker = tracker
        self._request = request
        self._run_id: str | None = None

    def open_run(self) -> LiveRun:
        """Makes the run. Raises RegistryUnavailable, RegistryRefused."""
        request = self._request
        name = _run_name(request.load, request.workload or "")
        live = self._tracker.start_run(_experiment(request.model), name, tags={"model": request.model})
        self._run_id = live.run_id
        return live

    def log(self, result: BenchResult) -> str:
        """Logs the result, into a run of its own where none follows it. Raises as `open_run`."""
        self._run_id = log_result(result, self._tracker, self._run_id)
        return self._run_id

    def add(self, page: Path) -> None:
        """Adds the page to the run of a logged result. Raises as `open_run`."""
        if self._run_id is not None:
            self._tracker.log_files(self._run_id, [page], PAGE_FOLDER)


def log_result(result: BenchResult, tracker: Tracker, run_id: str | None) -> str:
    """Logs it as a run of `benchmarks/MODEL`, or into the run that followed it; returns the run's id.

    Raises:
        RegistryUnavailable, RegistryRefused: MLflow is not there, or said no.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / RESULT_FILE, Path(scratch) / RECORDS_FILE]
        files[0].write_text(json.dumps(result.to_json(), indent=1, allow_nan=False), encoding="utf-8")
        write_parquet(result.records, files[1])
        return tracker.log_run(
            _experiment(result.model),
            _run_name(result.load, result.workload),
            tags=_tags(result),
            params={"load": result.load, "workload": result.workload, "url": result.url, "num_units": result.num_units}
            | {"slo_ttft_s": result.slo.ttft_s, "slo_tpot_s": result.slo.tpot_s, "weak": ",".join(result.weak)},
            metrics=run_fields.with_intervals(result.metrics, result.intervals),
            files={RUN_KIND: files},
            inputs=_inputs(result),
            run_id=run_id,
        )


def _experiment(model: str) -> str:
    return f"benchmarks/{model.partition('@')[0]}"


def _run_name(load: str, workload: str) -> str:
    return f"{load} {workload}".strip()


def _inputs(result: BenchResult) -> Inputs:
    made_from = {"seed": result.facts.get("prompt_seed", "unknown"), "num_requests": result.summary.num_requests}
    fingerprints = {name: value for name, value in result.facts.items() if name.endswith("fingerprint")}
    version = result.facts.get("version", "unknown")
    return Inputs(result.model.partition("@")[0], version, result.workload, made_from, fingerprints)


def _tags(result: BenchResult) -> dict[str, str]:
    saturated = {} if result.found.is_saturated is None else {"saturated": str(result.found.is_saturated).lower()}
    counted = result.counted.reason if isinstance(result.counted, Absent) else result.counted.gap or "agree"
    energy = result.used.reason if isinstance(result.used, Absent) else result.used.source
    return {
        run_fields.TAG_KIND: RUN_KIND,
        run_fields.TAG_VALID: "false" if result.invalid else "true",
        "model": result.model,
        "steady": result.found.steady,
        "interrupted": str(result.is_interrupted).lower(),
        "engine_counters": counted[: run_fields.MAX_VALUE_LENGTH],
        "energy": energy[: run_fields.MAX_VALUE_LENGTH],
        **saturated,
        **result.facts,
        **run_fields.told(result.invalid, result.notes),
    }
