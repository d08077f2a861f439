"""`workbench config`: is workbench.yaml right, and what does it amount to?"""

from __future__ import annotations

import sys

import typer
import yaml

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, out, settings

app = typer.Typer(no_args_is_help=True, help="Check and show the configuration.")


@app.command(epilog=epilog("workbench config check", "workbench config check --config staging.yaml --json"))
def check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Reads workbench.yaml with the environment over it and names every mistake; warnings do not fail it."""
    loaded = settings(config)
    warnings = loaded.warnings()
    data = {"ok": True, "warnings": warnings, "models": list(loaded.models), "pools": [p.pool_id for p in loaded.pools]}

    def show() -> None:
        for warning in warnings:
            out.print(f"[yellow]warning[/] {warning}")
        out.print(f"[green]ok[/] {len(loaded.models)} models, {len(loaded.pools)} pools")

    emit(data, as_json, show)


@app.command(epilog=epilog("workbench config show", "WORKBENCH__GATEWAY__PORT=9000 workbench config show --json"))
def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Prints the configuration that counts: defaults, your file, and the environment over both."""
    data = settings(config).model_dump(mode="json")
    emit(data, as_json, lambda: print_yaml(data))


def print_yaml(data: object) -> None:
    """Plain YAML on standard output, without colours, so that it can be piped into a file."""
    sys.stdout.write(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
