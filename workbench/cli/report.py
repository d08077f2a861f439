"""`workbench report`: notebooks, executed with parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, heavy, out, settings
from workbench.cli.compare import measured_cells
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.wiring import NotRunning, mlflow_uri

app = typer.Typer(no_args_is_help=True, help="Reports: notebooks executed by papermill, with their figures.")


def notebooks_dir(config: WorkbenchConfig) -> Path:
    """Where the notebooks lie: beside workbench.yaml."""
    return config.file.parent / "notebooks"


@app.command("list", epilog=epilog("workbench report list", "workbench report list --json"))
def list_reports(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows the notebooks that can be run."""
    names = sorted(path.stem for path in notebooks_dir(settings(config)).glob("*.ipynb"))
    emit(names, as_json, lambda: out.print("\n".join(names)))


@app.command(
    "run",
    epilog=epilog(
        "workbench report run 01_benchmark_sweep -p model smollm2-135m",
        "workbench report run 01_benchmark_sweep -p model gemma3-270m --out /tmp/reports --json",
        "workbench report run 04_trace_replay -p num_requests 60 --static",
        codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING),
    ),
)
def run_one(
    name: Annotated[str, typer.Argument(help="The notebook's name without .ipynb.")],
    values: Annotated[list[str] | None, typer.Argument(metavar="", hidden=True)] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME VALUE", help="A parameter of the notebook; may be repeated."),
    ] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the results; else reports/.")] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Figures as images in a small page without scripts; needs Chromium.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Executes a notebook and keeps the executed copy, an HTML page, and both in its MLflow run."""
    loaded = settings(config)
    module = heavy("workbench.report")
    try:
        report = module.run_report(
            name,
            named_values(parameters or [], values or []),
            out_dir or loaded.file.parent / "reports",
            notebooks_dir=notebooks_dir(loaded),
            artifacts=_artifacts(loaded),
            on_progress=lambda line: err.print(line, highlight=False, markup=False),
            is_static=static,
        )
    except (module.UnknownNotebook, module.BadParameter) as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    except module.ReportError as error:
        raise CommandFailed(str(error)) from None
    data = {"notebook": str(report.notebook), "html": str(report.html), "mlflow_run_id": report.mlflow_run_id}
    emit(data, as_json, lambda: out.print("\n".join(f"{key}: {value}" for key, value in data.items())))


@app.command(
    "page",
    epilog=epilog(
        "workbench report page 3f2a91c0",
        "workbench report page .workbench/results/3f2a91c0d1e2f3a4 --output sweep.html --json",
        codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING),
    ),
)
def page(
    reference: Annotated[
        str, typer.Argument(metavar="RUN_OR_DIR", help="A sweep's digest or folder, a cell's JSON file, an MLflow run.")
    ],
    output: Annotated[Path | None, typer.Option(help="The file to write; else reports/sweep-DIGEST.html.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes one self-contained page of what was measured, and adds it to the sweep's run in MLflow."""
    loaded = settings(config)
    cells = measured_cells(loaded, reference)
    pages = heavy("workbench.pages.publish")
    target = output or loaded.file.parent / "reports" / f"sweep-{cells[0].sweep_digest}.html"
    try:
        run_ids = pages.publish(cells, loaded, target, Path(reference), _artifacts(loaded))
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{target} is not made: {error}") from None
    data = {"html": str(target), "mlflow_run_ids": list(run_ids)}
    emit(data, as_json, lambda: out.print(f"{target}\nin MLflow: {', '.join(run_ids) or 'no run of it is there'}"))


def named_values(names: list[str], values: list[str]) -> dict[str, str]:
    """Parameters given as `-p NAME VALUE` (papermill's form) or `-p NAME=VALUE`.

    The parser takes one word an option, so the values of the first form arrive as the words left over, in order.

    Raises:
        CommandFailed: a name without a value, or a value without a name.
    """
    rest = iter(values)
    pairs = {}
    for name in names:
        key, separator, value = name.partition("=")
        pairs[key] = value if separator else next(rest, "")
        if not separator and pairs[key] == "":
            raise CommandFailed(f"-p {name} needs a value: -p {name} VALUE", Exit.USAGE)
    left = list(rest)
    if left:
        raise CommandFailed(
            f"{' '.join(left)!r} belongs to no parameter: -p NAME VALUE, after the report's name", Exit.USAGE
        )
    return pairs


def _artifacts(config: WorkbenchConfig) -> object | None:
    """MLflow as the place for a report's files; None without one, and the files are in the folder all the same."""
    try:
        uri = mlflow_uri(config)
    except NotRunning:
        return None
    return heavy("workbench.tracking").Tracker(uri)
