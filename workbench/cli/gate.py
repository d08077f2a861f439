"""`workbench gate`: may a candidate serve, by what was measured of it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.core.policies.gate import Verdicts
from serving.core.sequential import Verdict
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, heavy, out, run, settings
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.wiring import mlflow_uri, speak_as_service

if TYPE_CHECKING:
    from serving.control.registered import RegisteredVersion
    from workbench.gates.publish import Written


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        epilog=epilog(
            "workbench gate smollm2-135m@2",
            'workbench gate smollm2-135m@2 --announce "another base model" --json',
            "workbench gate smollm2-135m@2 --no-record",
            codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING),
        )
    )(gate)


def gate(
    reference: Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="The candidate.")],
    announce: Annotated[
        str, typer.Option(metavar="REASON", help="Why a change this large is meant: drift of `block` fails without.")
    ] = "",
    record: Annotated[
        bool, typer.Option(help="Whether the evidence is to count: in MLflow, and told to the control plane.")
    ] = True,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judges a candidate by what is kept of it and of the champion: sweeps, evaluations, a drift check.

    Says pass, fail or inconclusive and writes a page to judge by; exit code 1 unless it is a pass. Nothing is measured.
    """
    model, _, version = reference.partition("@")
    if not version:
        raise CommandFailed(f"{reference}: name the version, as {model}@2 (workbench models list)", Exit.USAGE)
    loaded = settings(config)
    uri = mlflow_uri(loaded)
    speak_as_service(loaded)
    gathering, publishing = heavy("workbench.gates.gather"), heavy("workbench.gates.publish")
    champion, candidate = _versions(loaded, uri, model, version)
    try:
        gathered = gathering.gather(loaded, champion, candidate, announced=announce)
    except heavy("workbench.comparison.cells").UnknownMetric as error:
        raise CommandFailed(f"gates: {error}", Exit.USAGE) from error
    written: Written = publishing.write(loaded, gathered)
    run_id = publishing.publish(loaded, uri, gathered, written).run_id if record else None
    said: Verdicts = gathered.record.verdicts()
    data = {
        "model": model,
        "version": version,
        "champion": champion.version,
        "verdict": said.verdict,
        "gates": {one.value: {"verdict": found.verdict, "reason": found.reason} for one, found in said.gates.items()},
        "digest": written.digest,
        "evidence": str(written.evidence),
        "page": str(written.page),
        "mlflow_run_id": run_id,
        "approve": publishing.approve_command(gathered.record, written.digest),
    }
    emit(data, as_json, lambda: _show(data, said))
    if said.verdict is not Verdict.PASS:
        raise typer.Exit(int(Exit.FAILED))


def _versions(
    loaded: WorkbenchConfig, uri: str, model: str, version: str
) -> tuple[RegisteredVersion, RegisteredVersion]:
    """The champion by the control plane's own record, else by the registry; and the candidate."""
    registry = heavy("serving.control.registry").Registry(uri)
    book = run(heavy("workbench.releases").read_book(loaded))
    known = book.of(model).champion
    champion, candidate = registry.get(model, None if known is None else known.version), registry.get(model, version)
    if champion.version == candidate.version:
        raise CommandFailed(f"{model}@{version} is the champion: there is nothing to hold it against", Exit.USAGE)
    return champion, candidate


def _show(data: dict[str, Any], said: Verdicts) -> None:
    out.print(f"{said.verdict.upper()}  {data['model']}@{data['version']} against @{data['champion']}", style="bold")
    for gate, found in said.gates.items():
        out.print(f"  {gate.value}: {found.verdict}; {found.reason}", highlight=False, markup=False)
    out.print(f"page: {data['page']}", highlight=False, soft_wrap=True, markup=False)
    out.print(f"digest: {data['digest']}", highlight=False, soft_wrap=True)
    if data["mlflow_run_id"] is None:
        out.print("not recorded: it counts for nothing")
    elif said.verdict is Verdict.PASS:
        out.print(f"to approve: {data['approve']}", highlight=False, soft_wrap=True, markup=False)
