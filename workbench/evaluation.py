"""Evaluations on the running stack: a suite asked through the gateway, kept below the data folder, logged to MLflow.

    found = workbench.evaluate("smollm2-135m@2", suite="gate")
    found.accuracy()

The answers of an engine to a suite and a seed are asked once: a later run with the same engine finds them kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from evals import results
from evals.endpoint import CONCURRENCY, Endpoint, check
from evals.harness import Progress, ask
from evals.results import Evaluation
from evals.suites import items_digest, suite_of
from serving.core.errors import BadRequest
from workbench.config import WorkbenchConfig
from workbench.connection import connected
from workbench.sweeps.on_stack import found_replica
from workbench.sync import run_sync
from workbench.wiring import gateway_url, layout, mlflow_uri

EXPERIMENT = "evaluations/"
# The run that another of the same engine, suite and seed took the place of.
BEFORE = ".before"


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What to ask whom.

    Attributes:
        model: a served name, `name@version` for another version than the champion.
        replica: the one that is to answer; the gateway chooses when None.
        seed: decides the items.
        fresh: ask again, although the answers are kept; those are then kept as the run before.
    """

    model: str
    suite: str = "smoke"
    replica: str | None = None
    seed: int = 0
    concurrency: int = CONCURRENCY
    api_key: str | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation, where it lies, and whether it was kept from before."""

    evaluation: Evaluation
    path: Path
    from_cache: bool


def evaluate_on_stack(
    config: WorkbenchConfig, request: EvalRequest, *, on_progress: Progress | None = None
) -> Evaluated:
    """Asks a suite of a model that the running stack serves. Blocks.

    Raises:
        BadRequest: no such suite.
        NotRunning, NotFound, Unavailable: no stack, or no replica of that model.
        UpstreamError: the gateway refused a request, or one failed three times.
    """
    try:
        items = suite_of(request.suite).items(request.seed)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    blank, endpoint = run_sync(lambda: _found(config, request, items_digest(items)))
    path = path_of(config, blank)
    if path.exists() and not request.fresh:
        return Evaluated(results.read(path), path, from_cache=True)
    run_sync(lambda: check(endpoint))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    found, seconds = ask(items, endpoint, seed=request.seed, on_progress=on_progress)
    evaluation = Evaluation(**blank, started_at=started_at, seconds=seconds, items=tuple(found))  # type: ignore[arg-type]
    if path.exists():
        path.replace(path.with_suffix(BEFORE + path.suffix))
    results.write(evaluation, path)
    return Evaluated(evaluation, path, from_cache=False)


def evaluate(
    model: str,
    *,
    suite: str = "smoke",
    replica: str | None = None,
    seed: int = 0,
    concurrency: int = CONCURRENCY,
    api_key: str | None = None,
    fresh: bool = False,
    log: bool = True,
) -> Evaluation:
    """What `workbench eval run` does, from a notebook. Raises as `evaluate_on_stack` and `logged`.

    Args:
        model: a served name, `name@version` for another version than the champion.
        suite: smoke, gate or nightly.
        replica: the one that answers, for admins; any when None.
        seed: decides the items.
        concurrency: requests in flight; evaluations to compare have the same.
        api_key: where the gateway wants one.
        fresh: ask again, although this engine's answers are kept.
        log: whether it goes to MLflow; its run's id is then the result's `mlflow_run_id`.
    """
    config = connected().config
    found = evaluate_on_stack(config, EvalRequest(model, suite, replica, seed, concurrency, api_key, fresh))
    return (logged(mlflow_uri(config), found) if log else found).evaluation


async def _found(config: WorkbenchConfig, request: EvalRequest, digest: str) -> tuple[Mapping[str, object], Endpoint]:
    """What is known of an evaluation before it is asked, and whom to ask."""
    async with found_replica(config, request.model, request.replica) as found:
        replica = found.replica
        blank = {
            "model": replica.model,
            "version": replica.version,
            "suite": request.suite,
            "seed": request.seed,
            "digest": digest,
            "engine": replica.engine_fingerprint,
            "concurrency": request.concurrency,
            "replica": request.replica,
        }
        name = f"{replica.model}@{replica.version}"
        url = gateway_url(config)
        return blank, Endpoint(url, name, found.tokenizer, request.api_key, request.replica, request.concurrency)


def path_of(config: WorkbenchConfig, blank: Mapping[str, object]) -> Path:
    """Where an evaluation lies: by model, suite, seed, engine and items."""
    where = f"-{blank['replica']}" if blank["replica"] else ""
    name = (
        f"{blank['suite']}-s{blank['seed']}-c{blank['concurrency']}-v{blank['version']}-"
        f"{str(blank['engine'])[:16]}-{blank['digest']}{where}.json"
    )
    return folder(config) / str(blank["model"]) / name


def folder(config: WorkbenchConfig) -> Path:
    """Of all evaluations."""
    return layout(config).data_dir / "evals"


def kept(config: WorkbenchConfig, reference: str, suite: str | None, *, before: bool = False) -> Evaluation:
    """A file's evaluation, or the newest of MODEL@VERSION.

    Args:
        config: whose data folder.
        reference: a file, or MODEL@VERSION.
        suite: the only one that counts; any when None.
        before: of MODEL@VERSION, a run that a newer one took the place of: the two tell its noise.

    Raises:
        BadRequest: there is none, or the file holds something else.
    """
    path = Path(reference)
    if not path.is_file():
        model, _, version = reference.partition("@")
        chosen = paths(config, model, version, suite, before=before)
        if not chosen:
            raise BadRequest(_none_kept(reference, before))
        path = chosen[-1]
    try:
        return results.read(path)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def paths(config: WorkbenchConfig, model: str, version: str, suite: str | None, *, before: bool = False) -> list[Path]:
    """Files of a model's evaluations, oldest first; an empty version is any. The arguments are those of `kept`."""
    found = (folder(config) / model).glob(f"{suite or '*'}-s*-v{version or '*'}-*.json")
    chosen = (one for one in found if (Path(one.stem).suffix == BEFORE) is before)
    return sorted(chosen, key=lambda one: one.stat().st_mtime)


def _none_kept(reference: str, before: bool) -> str:
    if before:
        return f"{reference} was asked once only, nor is that a file: run `workbench eval run {reference} --fresh`"
    return f"no evaluation of {reference} is kept, nor is that a file: run `workbench eval run {reference}`"


def logged(uri: str, evaluated: Evaluated) -> Evaluated:
    """The same, in MLflow's `evaluations/MODEL`: logged now, unless it was before, and with the run's id in its file.

    Raises:
        RegistryUnavailable, RegistryRefused: MLflow does not take it.
    """
    found = evaluated.evaluation
    if found.mlflow_run_id is not None:
        return evaluated
    # Seconds to import, and only what logs needs it.
    from workbench.tracking import Tracker

    named = ("model", "version", "suite", "seed", "digest", "engine", "concurrency", "replica")
    run_id = Tracker(uri).log_run(
        EXPERIMENT + found.model,
        f"{found.suite} of {found.model}@{found.version}",
        tags={"kind": "evaluation"},
        params={name: getattr(found, name) for name in named},
        metrics={f"accuracy/{task}": value for task, value in found.accuracy().items()}
        | {f"seconds/{task}": value for task, value in found.seconds.items()},
        files={"evaluation": [evaluated.path]},
    )
    found = replace(found, mlflow_run_id=run_id)
    results.write(found, evaluated.path)
    return replace(evaluated, evaluation=found)
