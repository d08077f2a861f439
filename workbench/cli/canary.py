"""`workbench canary`: rollouts of a candidate version beside the champion."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from serving.clock import SystemClock
from serving.core.canary import SIGNALS
from serving.core.errors import BadRequest, NotFound
from serving.core.policies.rollout import STEPS, Phase, Rollout, RolloutPlan
from serving.store.connection import connect
from serving.store.rollouts import Rollouts
from serving.store.routing_table import StoreRoutingTable
from workbench.cli import approval
from workbench.cli.canary_options import (
    AllowOption,
    ApprovalFromOption,
    ApprovalOption,
    DenyOption,
    GateOption,
    MustPassOption,
    PairsOption,
    PoolOption,
    ReferenceArgument,
    ShadowOption,
    StepsOption,
    StepTimeOption,
)
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, out, run, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.rollouts import Standing, standings
from workbench.wiring import store_url

app = typer.Typer(no_args_is_help=True, help="Rollouts: a candidate version gets a growing share of sessions.")
CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE)
ModelArgument = Annotated[str, typer.Argument(help="A served name.")]


@app.command(
    epilog=epilog(
        "workbench canary start smollm2-135m@2 --pool candidate",
        "workbench canary start smollm2-135m@2 --steps 5,50,100 --min-step-s 600 --no-approval --allow friendly-tenant",
        codes=CODES,
    )
)
def start(
    reference: ReferenceArgument,
    pool: PoolOption = None,
    steps: StepsOption = "1,5,25,50,100",
    min_step_s: StepTimeOption = 60.0,
    min_pairs: PairsOption = 20,
    shadow: ShadowOption = 0.0,
    approval_from: ApprovalFromOption = 25.0,
    approval: ApprovalOption = True,
    gate: GateOption = True,
    must_pass: MustPassOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begins a rollout of MODEL@VERSION beside the champion, which goes on as it is.

    The candidate gets sessions only while it has a ready replica. Any signal that alarms takes it back by itself.
    """
    loaded = settings(config)
    for name in pool or ():
        loaded.pool(name)
    plan = _plan(
        steps=_shares(steps),
        shadow_frac=shadow / 100.0,
        min_step_s=min_step_s,
        min_pairs=min_pairs,
        approval_from_frac=approval_from / 100.0 if approval else None,
        needs_gate=gate,
        must_pass=_signals(must_pass or ()),
        allow=tuple(allow or ()),
        deny=tuple(deny or ()),
        pools=tuple(pool or ()),
    )
    rollout = run(_start(loaded, reference, plan))
    emit(asdict(rollout), as_json, lambda: out.print(f"rollout of {reference} beside {rollout.model}@{rollout.stable}"))


@app.command(epilog=epilog("workbench canary status", "workbench canary status smollm2-135m --json", codes=CODES))
def status(
    model: Annotated[str | None, typer.Argument(help="A served name; all without one.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows where rollouts stand, what they wait for, and what the candidates' own traffic says."""
    found = run(_standings(settings(config), model))
    emit([one.as_json() for one in found], as_json, lambda: _show(found))


@app.command(epilog=epilog("workbench canary rollback smollm2-135m", codes=CODES))
def rollback(model: ModelArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Takes the candidate back at once; once it was promoted, the version before it becomes champion again."""
    _edit(config, as_json, model, "is taken back", _taken_back)


@app.command(epilog=epilog("workbench canary pause smollm2-135m", codes=CODES))
def pause(model: ModelArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Holds a rollout at its share. What is worse is still taken back."""
    _edit(config, as_json, model, "is paused", lambda one: replace(_running(one), is_paused=True))


@app.command(epilog=epilog("workbench canary resume smollm2-135m", codes=CODES))
def resume(model: ModelArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Lets a paused rollout go on."""
    _edit(config, as_json, model, "goes on", lambda one: replace(_running(one), is_paused=False))


approval.add_to(app)


def _edit(config: ConfigOption, as_json: bool, model: str, what: str, change: Callable[[Rollout], Rollout]) -> None:
    rollout = run(_changed(settings(config), model, change))
    emit(asdict(rollout), as_json, lambda: out.print(f"the rollout of {model}@{rollout.candidate} {what}"))


async def _changed(loaded: WorkbenchConfig, model: str, change: Callable[[Rollout], Rollout]) -> Rollout:
    client = connect(store_url(loaded))
    try:
        return await Rollouts(client).edit(model, change)
    finally:
        await client.aclose()


async def _standings(loaded: WorkbenchConfig, model: str | None) -> list[Standing]:
    client = connect(store_url(loaded))
    try:
        return await standings(client, model)
    finally:
        await client.aclose()


async def _start(loaded: WorkbenchConfig, reference: str, plan: RolloutPlan) -> Rollout:
    name, _, version = reference.partition("@")
    if not version:
        raise CommandFailed(f"{reference}: name the version, as {name}@2 (workbench models list)", Exit.USAGE)
    client = connect(store_url(loaded))
    try:
        routing_table = await StoreRoutingTable(client).read()
        models = {} if routing_table is None else {model.name: model for model in routing_table.models}
        if name not in models:
            raise NotFound(f"no model {name!r} is served; there are: {', '.join(sorted(models)) or 'none'}")
        champion = models[name].champion
        if champion is None:
            raise NotFound(f"{name} has no champion for {reference} to stand beside: workbench register {name} --first")
        if champion == version:
            raise BadRequest(f"{reference} is the champion already")
        if version not in models[name].versions:
            raise NotFound(f"no version {version!r} of {name}; there are: {', '.join(models[name].versions)}")
        now_s = SystemClock().now_s()
        rollout = Rollout(secrets.token_hex(8), name, champion, version, plan, now_s, now_s)
        await Rollouts(client).begin(rollout)
        return rollout
    finally:
        await client.aclose()


def _plan(**fields: Any) -> RolloutPlan:
    try:
        return RolloutPlan(**fields)
    except ValueError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None


def _shares(steps: str) -> tuple[float, ...]:
    try:
        return tuple(float(step) / 100.0 for step in steps.split(","))
    except ValueError:
        usual = ",".join(f"{100 * step:g}" for step in STEPS)
        raise CommandFailed(
            f"--steps are percents with commas between, as {usual}; got {steps!r}", Exit.USAGE
        ) from None


def _signals(names: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    known = [signal.name for signal in SIGNALS]
    for name in names:
        if name not in known:
            raise CommandFailed(f"no signal {name!r}; there are: {', '.join(known)}", Exit.USAGE)
    return tuple(names)


def _running(rollout: Rollout) -> Rollout:
    if rollout.phase.is_over:
        raise BadRequest(f"the rollout of {rollout.model}@{rollout.candidate} is over: {rollout.phase}")
    return rollout


def _taken_back(rollout: Rollout) -> Rollout:
    if rollout.phase is Phase.ROLLED_BACK:
        raise BadRequest(f"{rollout.model}@{rollout.candidate} was taken back already: {rollout.reason}")
    return replace(rollout, is_taken_back=True)


def _show(found: list[Standing]) -> None:
    if not found:
        out.print("no rollout yet: workbench canary start MODEL@VERSION")
    for one in found:
        rollout = one.rollout
        share = f"{100 * rollout.share_frac:g} % of sessions" if not rollout.phase.is_over else "over"
        out.print(
            f"{rollout.model}@{rollout.candidate} beside @{rollout.stable}: {rollout.phase}, {share}; {rollout.reason}",
            highlight=False,
        )
        for missing in one.waits_for:
            out.print(f"  waits for {missing}", highlight=False)
        rows = [
            [name, signal.verdict, signal.num_pairs, _points(signal.mean), f"{_points(low)} to {_points(high)}"]
            for name, signal in one.report.items()
            if signal.num_pairs
            for low, high in [signal.interval]
        ]
        if rows:
            out.print(table(None, ["signal", "verdict", "pairs", "points", "interval"], rows, right=(2, 3, 4)))


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f}"
