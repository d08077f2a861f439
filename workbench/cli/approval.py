"""`workbench canary approve|reject`: a release manager's word, written under that person's own name in MLflow.

Whoever runs it is known to MLflow by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a token; nothing of ours
stands in for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.core import gate_record
from serving.core.approval import TAG_APPROVAL, TAG_REJECTED
from serving.core.gate_record import GateRecord
from serving.core.sequential import Verdict
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, heavy, out, settings
from workbench.cli.exits import CommandFailed, Exit
from workbench.releases import EVIDENCE_PATH
from workbench.wiring import mlflow_uri

if TYPE_CHECKING:
    from serving.control.registry import Registry

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING)
DIGITS = re.compile(r"[0-9a-f]+")
MAX_REASON_CHARS = 1000
VersionArgument = Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="The candidate.")]


def add_to(app: typer.Typer) -> None:
    """Adds the two commands."""
    app.command(epilog=epilog("workbench canary approve smollm2-135m@2 --digest 0123456789abcdef", codes=CODES))(
        approve
    )
    app.command(epilog=epilog('workbench canary reject smollm2-135m@2 --reason "worse in German"', codes=CODES))(reject)


def approve(
    reference: VersionArgument,
    digest: Annotated[
        str, typer.Option(help="The digest that the gate's page shows: its first 16 digits, or more.", metavar="HEX")
    ],
    withdraw_rejection: Annotated[
        bool, typer.Option("--withdraw-rejection", help="Take back the rejection that stands there.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Approves the evidence of a gate, and shows what it said. Evidence of another digest is not approved."""
    model, version = _split(reference)
    given = _digits(digest)
    registry: Registry = heavy("serving.control.registry").Registry(mlflow_uri(settings(config)))
    tags = registry.tags(model, version)
    if (why := tags.get(TAG_REJECTED)) and not withdraw_rejection:
        raise CommandFailed(f"{reference} was rejected: {why}; --withdraw-rejection takes that back")
    data, record = _evidence(registry, tags, reference)
    found, verdicts = gate_record.digest(data), record.verdicts()
    if not found.startswith(given):
        raise CommandFailed(
            f"the evidence of {reference} has the digest {found[: gate_record.MIN_APPROVAL_DIGITS]}, not {given}: "
            "the gate was run again; look at its new page first"
        )
    if verdicts.verdict is not Verdict.PASS:
        raise CommandFailed(f"the gates say {verdicts.verdict} of {reference}: there is nothing to approve")
    gone: dict[str, str | None] = {TAG_REJECTED: None} if TAG_REJECTED in tags else {}
    registry.write_tags(model, version, gone | {TAG_APPROVAL: given})
    shown = {
        "model": model,
        "version": version,
        "approval": given,
        "digest": found,
        "mlflow_run_id": tags[gate_record.TAG_RUN],
        "champion": record.champion.version,
        "gathered_at": record.gathered_at,
        "weights_digest": record.candidate.weights_digest,
        "gates": {gate.value: one.verdict for gate, one in verdicts.gates.items()},
        "differences": dict(record.differences),
    }
    emit(shown, as_json, lambda: _show(shown))


def reject(
    reference: VersionArgument,
    reason: Annotated[str, typer.Option(help="Why; the rollout shows it.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rejects a version: a rollout of it is taken back at once, and an approval of it is withdrawn."""
    model, version = _split(reference)
    said = " ".join(reason.split())
    if not said or len(said) > MAX_REASON_CHARS:
        raise CommandFailed(f"--reason: say why, in 1 to {MAX_REASON_CHARS} characters", Exit.USAGE)
    registry: Registry = heavy("serving.control.registry").Registry(mlflow_uri(settings(config)))
    tags = registry.tags(model, version)
    registry.write_tags(model, version, {TAG_REJECTED: said} | ({TAG_APPROVAL: None} if TAG_APPROVAL in tags else {}))
    data = {"model": model, "version": version, "rejected": said}
    emit(data, as_json, lambda: out.print(f"{reference} is rejected: {said}", highlight=False, markup=False))


def _split(reference: str) -> tuple[str, str]:
    model, _, version = reference.partition("@")
    if not version:
        raise CommandFailed(f"{reference}: name the version, as {model}@2 (workbench models list)", Exit.USAGE)
    return model, version


def _digits(digest: str) -> str:
    given = digest.strip().lower()
    if not DIGITS.fullmatch(given) or not gate_record.MIN_APPROVAL_DIGITS <= len(given) <= 64:
        raise CommandFailed(
            f"--digest: {digest!r} is not {gate_record.MIN_APPROVAL_DIGITS} to 64 hexadecimal digits; "
            "the gate's page shows them",
            Exit.USAGE,
        )
    return given


def _evidence(registry: Registry, tags: Mapping[str, str], reference: str) -> tuple[bytes, GateRecord]:
    """The record that the version's tags point to, as it lies in MLflow now."""
    run_id = tags.get(gate_record.TAG_RUN)
    data = None if run_id is None else registry.artifact(run_id, EVIDENCE_PATH)
    if data is None:
        raise CommandFailed(f"no evidence on {reference} to approve: run `workbench gate {reference}`")
    try:
        record = gate_record.read(data)
    except gate_record.BrokenRecord as error:
        raise CommandFailed(f"the evidence of {reference} cannot be approved: {error}") from error
    if f"{record.model}@{record.candidate.version}" != reference:
        raise CommandFailed(
            f"the evidence that {reference} points to is of {record.model}@{record.candidate.version}: "
            "somebody changed its tags"
        )
    return data, record


def _show(shown: Mapping[str, Any]) -> None:
    out.print(f"approved: {shown['model']}@{shown['version']}, evidence {shown['digest']}", highlight=False)
    gates = ", ".join(f"{gate} {verdict}" for gate, verdict in shown["gates"].items())
    out.print(f"  against @{shown['champion']}, judged {shown['gathered_at']}: {gates}", highlight=False)
    out.print(f"  weights {shown['weights_digest']}", highlight=False, soft_wrap=True)
    for name, (old, new) in shown["differences"].items():
        out.print(f"  {name}: {old} → {new}", highlight=False, markup=False, soft_wrap=True)
