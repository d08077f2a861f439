"""Evaluations on the running stack: a suite asked through the gateway, kept below the data folder, logged to MLflow.

    found = workbench.evaluate("smollm2-135m@2", suite="gate")
    found.accuracy()

The answers of an engine to a suite and a seed are asked once: a later run with the same engine finds them kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from evals import results
from evals.harness import CONCURRENCY, Endpoint, Progress, ask
from evals.results import Evaluation
from evals.suites import items_digest, suite_of
from serving.core.errors import BadRequest, UpstreamError
from serving.engine.client import EngineClient, UnexpectedStatus
from workbench.config import WorkbenchConfig
from workbench.connection import connected
from workbench.sweeps.on_stack import found_replica
from workbench.sync import run_sync
from workbench.wiring import gateway_url, layout

EXPERIMENT = "evaluations/"
PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What to ask whom.

    Attributes:
        model: a served name, `name@version` for another version than the champion.
        replica: the one that is to answer; the gateway chooses when None.
        seed: decides the items.
        fresh: ask again, although the answers are kept.
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
        UpstreamError: the gateway refused the first request, or one failed three times.
    """
    try:
        items = suite_of(request.suite).items(request.seed)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    blank, endpoint = run_sync(lambda: _found(config, request, items_digest(items)))
    path = path_of(config, blank)
    if path.exists() and not request.fresh:
        return Evaluated(results.read(path), path, from_cache=True)
    run_sync(lambda: _probe(endpoint))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    found, seconds = ask(items, endpoint, seed=request.seed, on_progress=on_progress)
    evaluation = Evaluation(**blank, started_at=started_at, seconds=seconds, items=tuple(found))  # type: ignore[arg-type]
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
) -> Evaluation:
    """What `workbench eval run` does, from a notebook; not logged. Raises as `evaluate_on_stack`.

    Args:
        model: a served name, `name@version` for another version than the champion.
        suite: smoke, gate or nightly.
        replica: the one that answers, for admins; any when None.
        seed: decides the items.
        concurrency: requests in flight; evaluations to compare have the same.
        api_key: where the gateway wants one.
        fresh: ask again, although this engine's answers are kept.
    """
    request = EvalRequest(model, suite, replica, seed, concurrency, api_key, fresh)
    return evaluate_on_stack(connected().config, request).evaluation


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


async def _probe(endpoint: Endpoint) -> None:
    """One token, so that a refusal is told once and in the gateway's words."""
    headers = [(name.encode(), value.encode()) for name, value in endpoint.headers().items()]
    body = f'{{"model": "{endpoint.model}", "prompt": "Hello", "max_tokens": 1, "service_tier": "flex"}}'
    async with (
        EngineClient(endpoint.url) as client,
        await client.request(
            "POST",
            "/v1/completions",
            headers=[*headers, (b"content-type", b"application/json")],
            body=body.encode(),
            timeout_s=PROBE_TIMEOUT_S,
        ) as response,
    ):
        answer = (await response.read())[:300].decode("utf-8", "replace")
    if response.status == 401 or response.status == 403:
        raise UpstreamError(f"the gateway refused the key: give one that may do this with --api-key-env ({answer})")
    if response.status != 200:
        raise UnexpectedStatus(
            f"the gateway answered {response.status}: {answer}", engine_status=response.status, body=answer.encode()
        )


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


def kept(config: WorkbenchConfig, reference: str, suite: str | None) -> Evaluation:
    """A file's evaluation, or the newest of MODEL@VERSION.

    Raises:
        BadRequest: there is none, or the file holds something else.
    """
    path = Path(reference)
    if not path.is_file():
        model, _, version = reference.partition("@")
        found = (folder(config) / model).glob(f"{suite or '*'}-s*-v{version or '*'}-*.json")
        newest = sorted(found, key=lambda one: one.stat().st_mtime)
        if not newest:
            raise BadRequest(
                f"no evaluation of {reference} is kept, nor is that a file: run `workbench eval run {reference}`"
            )
        path = newest[-1]
    try:
        return results.read(path)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def log(uri: str, evaluated: Evaluated) -> str:
    """Logs to MLflow's `evaluations/MODEL`; returns the run's id.

    Raises:
        RegistryUnavailable, RegistryRefused: MLflow does not take it.
    """
    # Seconds to import, and only what logs needs it.
    from workbench.tracking import Tracker

    found = evaluated.evaluation
    named = ("model", "version", "suite", "seed", "digest", "engine", "concurrency", "replica")
    return Tracker(uri).log_run(
        EXPERIMENT + found.model,
        f"{found.suite} of {found.model}@{found.version}",
        tags={"kind": "evaluation"},
        params={name: getattr(found, name) for name in named},
        metrics={f"accuracy/{task}": value for task, value in found.accuracy().items()}
        | {f"seconds/{task}": value for task, value in found.seconds.items()},
        files={"evaluation": [evaluated.path]},
    )
