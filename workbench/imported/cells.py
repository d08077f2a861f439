"""Imported runs as cells in a folder of their own, so that they can be compared and shown like ours.

    FILE → ForeignRun → CellResult (provenance: the tool) → results/imported/<digest of the files>/

Where the file has its requests, figures are ours by our definitions, and what the tool reported stands beside as
`reported/…`; else its own figures are all that there is, without intervals. Nothing imported enters a cost table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.core.state import Task
from workbench.imported import aiperf, vllm_bench
from workbench.imported.foreign import ForeignRun, NotImportable, documents
from workbench.loadgen import Slo, Summary, summarize
from workbench.provenance import git_commit
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape, file_stem
from workbench.sweeps.results import IMPORTED_FOLDER, ResultsFolder

UNKNOWN = "unknown"
MAX_FAILED_FRAC = 0.05
"""As for our own cells."""


@dataclass(frozen=True, slots=True)
class About:
    """What the files do not say; `model` is NAME or NAME@VERSION, the tool's own name when None."""

    model: str | None = None
    hardware_class: str = UNKNOWN
    num_units: int = 1
    slo: Slo = field(default_factory=lambda: Slo(1.0, 0.025))


def read_file(path: Path) -> list[ForeignRun]:
    """The runs in a file of vLLM's benchmark or of AIPerf.

    Raises:
        NotImportable: it is neither, or broken; the message says what would be right.
    """
    found = documents(path)
    if all(vllm_bench.is_it(one) for one in found):
        return [vllm_bench.read(one, path) for one in found]
    if len(found) == 1 and aiperf.is_it(found[0]):
        return [aiperf.read(found[0], path)]
    if aiperf.is_request(found[0]):
        summary = path.with_name(aiperf.SUMMARY_FILE)
        if not summary.is_file():
            raise NotImportable(
                f"{path} holds AIPerf's requests without model and load: {aiperf.SUMMARY_FILE} must lie beside it"
            )
        return read_file(summary)
    keys = ", ".join(sorted(found[0])[:8]) or "nothing"
    raise NotImportable(
        f"{path} is no result of `vllm bench serve --save-result` and no {aiperf.SUMMARY_FILE} of AIPerf: "
        f"it holds {keys}"
    )


def import_files(paths: Sequence[Path], results_dir: Path, about: About) -> ResultsFolder:
    """Keeps the runs of these files as the cells of one result; the same files again change nothing.

    Raises:
        NotImportable: as `read_file`; nothing is kept then.
        ResultsNotWritten: the disk is full.
    """
    runs = sorted((run for path in paths for run in read_file(path)), key=lambda run: run.started_at_s)
    content = "".join(sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)) + repr(about)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    cells = [_cell(run, digest, about) for run in runs]
    folder = ResultsFolder(results_dir / IMPORTED_FOLDER, digest)
    folder.open(_header(cells, paths))
    known = {cell.measurement_id for cell in folder.cells()}
    for cell, run in zip(cells, runs, strict=True):
        if cell.measurement_id not in known:
            folder.write_cell(cell, run.records)
    return folder


def _header(cells: Sequence[CellResult], paths: Sequence[Path]) -> dict[str, Any]:
    return {
        "plan": {"mode": "imported", "files": [str(path) for path in paths]},
        "replica": {"model": cells[0].model, "version": cells[0].version},
        "cells": [cell.spec.cell_id for cell in cells],
        "commit": git_commit(),
    }


def _cell(run: ForeignRun, digest: str, about: About) -> CellResult:
    served = max(1, run.num_requests - run.num_failed)
    shape = Shape(round(run.num_prompt_tokens / served), round(run.num_output_tokens / served))
    spec = CellSpec(CellKind.MIXED, shape, run.concurrency, run.num_requests, load=run.load)
    name, _, version = (about.model or run.model.lower().replace("/", "--")).partition("@")
    reported = {key: _a_unit(key, value, about.num_units) for key, value in run.reported.items()}
    summary = _summary(run, about)
    has_ours = summary is not None and summary.invalid is None
    metrics, notes = dict(reported), [f"imported from {run.tool}, with its own figures: it kept no requests"]
    if summary is not None and has_ours:
        metrics = summary.metrics | {f"reported/{key}": value for key, value in reported.items()}
        notes = [f"imported from {run.tool}: figures by our definitions from its requests; its own are reported/…"]
    elif summary is not None:
        notes = [f"imported from {run.tool}, with its own figures; of its requests none are made: {summary.invalid}"]
    window = summary.window if summary is not None and has_ours else None
    return CellResult(
        sweep_digest=digest,
        spec=spec,
        model=name,
        version=version or UNKNOWN,
        task=Task.GENERATE,
        hardware_class=about.hardware_class,
        num_units=about.num_units,
        engine_fingerprint=UNKNOWN,
        hardware_fingerprint=UNKNOWN,
        engine_covers=dict(run.facts),
        hardware_covers={},
        replica_id=UNKNOWN,
        started_at_s=run.started_at_s,
        ended_at_s=run.started_at_s + run.duration_s,
        window_s=window.length_s if window else run.duration_s,
        num_requests=run.num_requests,
        num_failed=run.num_failed,
        failures={},
        num_prompt_tokens=window.num_prompt_tokens if window else run.num_prompt_tokens,
        num_cached_tokens=window.num_cached_tokens if window else 0.0,
        num_output_tokens=window.num_output_tokens if window else run.num_output_tokens,
        engine_num_prompt_tokens=0,
        engine_num_output_tokens=0,
        prefix_cache_hit_frac=0.0,
        decode_tokens_per_s=None,
        metrics=metrics,
        intervals=summary.intervals if summary is not None and has_ours else {},
        client_error_frac=0.0,
        prompt_seed=0,
        commit=git_commit(),
        records_file=f"{file_stem(spec.cell_id, run.started_at_s)}.parquet" if run.records else None,
        weak=tuple(sorted(summary.weak)) if summary is not None and has_ours else (),
        notes=(*notes, "how late its client was, and what the engine counted, are not known"),
        invalid=_invalid(run),
        energy="not in an imported result",
        provenance=run.tool,
    )


def _summary(run: ForeignRun, about: About) -> Summary | None:
    if not run.records:
        return None
    num_warm_up = 0 if run.load else run.concurrency
    return summarize(run.records, slo=about.slo, num_units=about.num_units, num_warm_up=num_warm_up)


def _invalid(run: ForeignRun) -> str | None:
    if not run.num_requests:
        return "no request was sent"
    failed_frac = run.num_failed / run.num_requests
    return f"{run.num_failed} of {run.num_requests} requests failed" if failed_frac > MAX_FAILED_FRAC else None


def _a_unit(name: str, value: float, num_units: int) -> float:
    return value / num_units if name.endswith("_per_gpu") else value
