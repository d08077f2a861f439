"""`workbench eval run|compare`: how good is a model, and is one version worse than another?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.bench_options import ApiKeyEnvOption, api_key
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, heavy, out, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.wiring import mlflow_uri

if TYPE_CHECKING:
    from evals.suite_compare import SuiteComparison
    from workbench.evaluation import Evaluated

app = typer.Typer(no_args_is_help=True, help="How good a model is on our tasks, and whether one is worse than another.")

SuiteOption = Annotated[str, typer.Option(help="smoke (a minute), gate (minutes) or nightly.")]
MAX_EVAL_CONCURRENCY = 256


@app.command(
    "run",
    epilog=epilog(
        "workbench eval run smollm2-135m --suite smoke",
        "workbench eval run smollm2-135m@2 --suite gate --json",
        "workbench eval run smollm2-135m --suite gate --replica main-1 --api-key-env ADMIN_KEY --fresh",
        codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING),
    ),
)
def run_suite(
    model: Annotated[str, typer.Argument(metavar="MODEL[@VERSION]", help="Which; the champion without a version.")],
    suite: SuiteOption = "smoke",
    replica: Annotated[str | None, typer.Option(help="The one replica that answers; needs an admin's key.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the items.")] = 0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=MAX_EVAL_CONCURRENCY, help="Requests in flight; runs to compare have the same.")
    ] = 8,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ask again, although this engine's answers are kept: the noise floor.")
    ] = False,
    api_key_env: ApiKeyEnvOption = None,
    log: Annotated[bool, typer.Option(help="Whether the result goes to MLflow.")] = True,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Asks a suite's items through the gateway, as batch traffic, and says how many answers of each task are right."""
    module = heavy("workbench.evaluation")
    loaded = settings(config)
    request = module.EvalRequest(model, suite, replica, seed, concurrency, api_key(api_key_env), fresh)
    found: Evaluated = module.evaluate_on_stack(loaded, request, on_progress=_tell)
    if log:
        found = module.logged(mlflow_uri(loaded), found)
    evaluation = found.evaluation
    data = asdict(evaluation) | {
        "accuracy": evaluation.accuracy(),
        "counts_in_gate": evaluation.counts_in_gate(),
        "file": str(found.path),
        "from_cache": found.from_cache,
    }
    emit(data, as_json, lambda: _show(found))


@app.command(
    "compare",
    epilog=epilog(
        "workbench eval compare smollm2-135m@1 smollm2-135m@2 --suite gate",
        "workbench eval compare champion.json candidate.json --again champion-again.json --tolerance 1 --json",
    ),
)
def compare(
    champion: Annotated[str, typer.Argument(help="A file of `eval run`, or MODEL@VERSION for its newest one.")],
    challenger: Annotated[str, typer.Argument(help="The same for the other.")],
    again: Annotated[
        str | None,
        typer.Option(help="Another run of the champion, for the noise floor: a file, or MODEL@VERSION asked twice."),
    ] = None,
    suite: Annotated[str | None, typer.Option(help="Which suite's newest run MODEL@VERSION means.")] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="POINTS", min=0.01, max=99, help="The drop that is not to pass.")
    ] = 2.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Is the challenger worse, item by item? pass, fail or inconclusive; exit code 1 unless it is a pass."""
    module, judging = heavy("workbench.evaluation"), heavy("evals.suite_compare")
    loaded = settings(config)
    first, second = (module.kept(loaded, reference, suite) for reference in (champion, challenger))
    own = None if again is None else module.kept(loaded, again, suite, before=True)
    try:
        found = judging.compare_suites(first, second, again=own, tolerance=tolerance / 100.0)
    except ValueError as error:
        raise CommandFailed(str(error), Exit.USAGE) from error
    emit(asdict(found), as_json, lambda: _show_comparison(found))
    if found.verdict != "pass":
        raise typer.Exit(int(Exit.FAILED))


def _tell(task: str, done: int, total: int) -> None:
    err.print(f"[dim]{done} of {total} items" + (f"; {task} next" if task else ""), highlight=False)


def _show(found: Evaluated) -> None:
    evaluation = found.evaluation
    counts = evaluation.counts_in_gate()
    sizes: dict[str, int] = {}
    for item in evaluation.items:
        sizes[item.task] = sizes.get(item.task, 0) + 1
    rows: list[list[Any]] = [
        [task, sizes[task], f"{100 * value:.1f}", f"{evaluation.seconds[task]:.1f}", "yes" if counts[task] else "no"]
        for task, value in evaluation.accuracy().items()
    ]
    title = f"{evaluation.model}@{evaluation.version}, suite {evaluation.suite}, seed {evaluation.seed}"
    columns = ["task", "items", "right, %", "seconds", "counts in a gate"]
    out.print(table(title, columns, rows, right=(1, 2, 3)))
    kept = "kept from before" if found.from_cache else f"{sum(evaluation.seconds.values()):.0f} s"
    out.print(f"{kept}: {Path(found.path)}", highlight=False, soft_wrap=True)


def _show_comparison(found: SuiteComparison) -> None:
    out.print(str(found.verdict), style="bold")
    out.print(f"  pool: {found.pool}", highlight=False)
    for task, one in found.tasks.items():
        p = "only reported" if one.p_holm is None else f"p of no drop {one.p_holm:.3f} after Holm"
        out.print(f"  {task}: {100 * one.comparison.effect:+.1f} points; {p}", highlight=False)
    floor = found.noise_floor
    said = "not measured (--again)" if floor is None else f"{100 * floor.discordant_frac:.1f} % of items differ"
    out.print(f"  noise floor: {said}", highlight=False)
    for reason in found.reasons:
        out.print(f"  {reason}", highlight=False)
