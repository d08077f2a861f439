"""Options of `workbench canary start`."""

from __future__ import annotations

from typing import Annotated

import typer

ReferenceArgument = Annotated[str, typer.Argument(metavar="MODEL@VERSION", help="The candidate.")]
PoolOption = Annotated[
    list[str] | None, typer.Option(help="A pool to start for it, and to end if it is taken back. May be repeated.")
]
StepsOption = Annotated[str, typer.Option(help="Percent of sessions, rising to 100.")]
StepTimeOption = Annotated[float, typer.Option(help="Seconds that a step lasts at least.", min=0)]
PairsOption = Annotated[int, typer.Option(help="Pairs of sessions that a step needs.", min=0)]
ShadowOption = Annotated[
    float,
    typer.Option(help="Percent of consenting tenants' requests, mirrored before the steps.", min=0, max=100),
]
ApprovalFromOption = Annotated[float, typer.Option(help="Percent from which an approval must stand.", min=0, max=100)]
ApprovalOption = Annotated[bool, typer.Option(help="Whether a release manager's approval is needed.")]
GateOption = Annotated[bool, typer.Option(help="Whether the gates' verdict must be pass.")]
MustPassOption = Annotated[
    list[str] | None, typer.Option(help="A signal that must be within its tolerance before promotion. May be repeated.")
]
AllowOption = Annotated[
    list[str] | None, typer.Option(help="A tenant that gets it; nobody else does before 100 %. May be repeated.")
]
DenyOption = Annotated[
    list[str] | None, typer.Option(help="A tenant that does not get it before 100 %. May be repeated.")
]
