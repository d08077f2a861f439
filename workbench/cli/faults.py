"""`workbench faults`: planted regressions, to see whether evaluations and gates find them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serving.engine.weights import resolve
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, heavy, out, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.config_layers import unknown
from workbench.wiring import layout

if TYPE_CHECKING:
    from evals.fault_effects import Effect

app = typer.Typer(no_args_is_help=True, help="Planted regressions: models made worse in a known way.")
CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING)


@app.command("list", epilog=epilog("workbench faults list", "workbench faults list --json", codes=CODES))
def list_faults(as_json: JsonOption = False) -> None:
    """Shows the kinds of faults and what was measured of each."""
    faults = heavy("evals.faults")
    effects = heavy("evals.fault_effects").EFFECTS
    data = [
        {
            "kind": fault.kind,
            "of": "serving" if fault.proxy else "model",
            "summary": fault.summary,
            "measured": effects[fault.kind].as_json() if fault.kind in effects else None,
        }
        for fault in faults.FAULTS
    ]
    rows = [[one["kind"], one["of"], one["summary"], *_figures(effects.get(one["kind"]))] for one in data]
    columns = ["kind", "of", "what is wrong", "mean KL, nats", "accuracy, points"]
    emit(data, as_json, lambda: out.print(table(None, columns, rows, right=(3, 4))))


def _figures(effect: Effect | None) -> tuple[str, str]:
    """Of a fault, what was measured; empty where nothing was."""
    if effect is None:
        return "", ""
    if effect.accuracy_points is None:
        return f"{effect.kl_mean:g}", ""
    points, low, high = effect.accuracy_points
    return f"{effect.kl_mean:g}", f"{points:+.1f} ({low:+.1f} to {high:+.1f})"


@app.command(
    epilog=epilog(
        "workbench faults make int4-channel --model smollm2-135m --output /tmp/int4",
        "workbench faults make noise-weak --model /models/my-model --output /tmp/noise --seed 2",
        codes=CODES,
    )
)
def make(
    kind: Annotated[str, typer.Argument(help="As `workbench faults list` names it.")],
    model: Annotated[str, typer.Option(help="A model of workbench.yaml, or a model's folder.")],
    output: Annotated[Path, typer.Option(help="A folder that does not exist yet.")],
    seed: Annotated[int, typer.Option(help="Of what is drawn: noise and merges.", min=0)] = 0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a copy of a model with one fault; files that the fault leaves alone are hard links."""
    source = model
    if not Path(model).expanduser().is_dir():
        models = settings(config).models
        if model not in models:
            raise CommandFailed(f"{unknown(model, 'model', list(models))}; or name a folder", Exit.USAGE)
        source = models[model].source
    folder = Path(source).expanduser()
    if not folder.is_dir():
        cache = layout(settings(config)).models_dir
        folder = resolve(source, cache, on_progress=lambda line: err.print(line, highlight=False)).path
    faults = heavy("evals.faults")
    made = faults.make(kind, folder, output, seed=seed)
    about = faults.about(made)
    emit({**about, "output": str(made)}, as_json, lambda: out.print(f"{kind}: {made}", highlight=False))
