"""`workbench lineage`: from a version, or from one request, to all that it rests on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, heavy, out, run, settings
from workbench.cli.exits import Exit
from workbench.wiring import mlflow_uri

if TYPE_CHECKING:
    from workbench.lineage import Lineage


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        epilog=epilog(
            "workbench lineage smollm2-135m@2",
            "workbench lineage req-0123456789abcdef --json",
            codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING),
        )
    )(lineage)


def lineage(
    reference: Annotated[
        str,
        typer.Argument(metavar="MODEL[@VERSION]|REQUEST_ID", help="A version, a model's champion, or an x-request-id."),
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Weights, source, evaluations, gate, approval, rollout, and what was served of it by the usage spool."""
    loaded = settings(config)
    found: Lineage = run(heavy("workbench.lineage").lineage(loaded, mlflow_uri(loaded), reference))
    emit(asdict(found), as_json, lambda: _show(found))


def _show(found: Lineage) -> None:
    def line(text: str) -> None:
        out.print(text, highlight=False, markup=False, soft_wrap=True)

    if found.request is not None:
        line(f"request {found.request['request_id']} of {found.request['tenant']}, on {found.request['replica']}")
    registered = found.registered
    line(f"{found.model}@{found.version}" + (", champion" if registered["is_champion"] else ""))
    line(f"  weights     {registered['weights_digest']} from {registered['source']}")
    for one in found.evaluations:
        accuracy = ", ".join(f"{task} {100 * value:.0f} %" for task, value in one["accuracy"].items())
        line(f"  evaluated   {one['suite']}, {one['started_at']}: {accuracy}{_run(one)}")
    for one in found.measurements:
        line(f"  measured    {one['cell']} on {one['hardware_class']}, {one['ended_at']}{_run(one)}")
    line(f"  drift       {_drift(found.drift)}")
    line(f"  gate        {_gate(found.gate)}")
    line(f"  approval    {found.approval['approval'] or 'none'}{_rejected(found)}")
    line(f"  rollout     {_rollout(found.rollout)}")
    served = found.served
    tokens = served["num_prompt_tokens"] + served["num_output_tokens"]
    line(f"  served      {served['num_requests']} requests, {tokens} tokens, {served['usd']:.6f} usd")
    for text in found.unknown:
        line(f"  unknown     {text}")


def _run(one: dict[str, Any]) -> str:
    return f", MLflow run {one['mlflow_run_id']}" if one["mlflow_run_id"] else ""


def _drift(found: Any) -> str:
    return "never checked" if found is None else f"{found['action']}, {found['checked_at']}"


def _gate(found: Any) -> str:
    if found is None:
        return "never run"
    said = (
        found["why"] if "why" in found else f"{found['verdict']} against @{found['champion']}, {found['gathered_at']}"
    )
    changed = "; NOT the evidence that was recorded" if found["recorded_digest"] not in (None, found["digest"]) else ""
    return f"{said}, digest {str(found['digest'])[:16]}, MLflow run {found['mlflow_run_id']}{changed}"


def _rejected(found: Lineage) -> str:
    why = found.approval["approval.rejected"]
    return f"; rejected: {why}" if why else ""


def _rollout(found: Any) -> str:
    return "none" if found is None else f"{found['part']} of {found['rollout_id']}: {found['phase']}; {found['reason']}"
