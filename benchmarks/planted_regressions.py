"""Planted regressions rolled out beside the sound model, on a real stack: is each stopped before everybody gets it?

    python -m benchmarks.planted_regressions [--quick] [--json FILE]

    registered ─▶ `canary start` deploys it ─▶ drift check ─▶ items asked of both ─▶ verdicts recorded ─▶ rollout moves
        sessions ask the bare name all the while; whom they were served by is counted

The sound model goes the same way as a version of its own, and must come to serve everybody. Gates of quality and drift
are under test here. Those of performance, cost and safety are not: the evidence says so, and they are written down as
passed, or nothing would ever get through.

A fault of serving is attached: a sound engine behind a proxy that spoils requests. Each trial is kept by the digest of
weights, flags and items below `.workbench/planted`: a run that was cut off goes on with the next one.

The full form asks all of suite `gate`; `--quick` stops as soon as a test that may be looked at after every item can
tell. What else the tripwires must do is in `planted_tripwires`, and true effects in `planted_effects`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from benchmarks.harness import Bar, Mode, run
from benchmarks.planted_engines import BASE, FOLDER, MODEL, Planted, flags, make, planted, sound
from benchmarks.planted_quality import quality_in_full, quality_stopped_early
from benchmarks.planted_stack import PlantedStack, Sessions, folder_of, planted_stack
from benchmarks.planted_trials import Found, Trial, bars, row
from evals import readings
from serving.core.policies.gate import DriftFound, Gate, GateEvidence, GatePolicy, judge
from serving.core.policies.rollout import Phase
from serving.core.sequential import Verdict
from serving.engine.weights import Weights

NOT_JUDGED = (Gate.PERFORMANCE, Gate.COST, Gate.SAFETY)
PLAN = ("--min-step-s", "0", "--min-pairs", "0", "--approval-from", "100")
SETTLE_TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.5
# So long without a move, the rollout is held: the control plane asks its judge every two seconds.
HELD_AFTER_S = 15.0


_TRIAL = TypeAdapter(Trial)


def measure(mode: Mode, console: Console) -> Sequence[Bar]:
    """Planted regressions rolled out on a real stack of vLLM engines."""
    base = sound(console.print)
    chosen = [Planted(BASE), *planted(mode)]
    missing = [one for one in chosen if not _path(one, mode, base).is_file()]
    if missing:
        cores = sorted(os.sched_getaffinity(0))
        with planted_stack(missing, (cores[0], cores[-1])) as stack:
            reference = _prepared(stack)
            for one in missing:
                weights = make(one, base, folder_of(one))
                with stack.served(one, weights):
                    trial = _tried(stack, one, weights, mode, reference)
                _keep(trial, mode, base)
                console.print(row(trial), highlight=False)
    found = [_TRIAL.validate_json(_path(one, mode, base).read_bytes()) for one in chosen]
    return [bar for trial in found for bar in bars(trial)]


def _prepared(stack: PlantedStack) -> Path:
    """The champion's reference for drift; a rollout that a run before left behind is ended first."""
    standing = stack.standing()
    if standing is not None:
        _clean_up(stack, standing)
    kept = sorted((FOLDER / "stack" / "drift").glob("*.json"))
    return kept[0] if kept else Path(stack.say("drift", MODEL, "--take-reference")["reference"])


def _tried(stack: PlantedStack, one: Planted, weights: Weights, mode: Mode, reference: Path) -> Trial:
    champion, version = stack.champion(), stack.register(one, weights)
    began_s = time.monotonic()
    stack.begin(one, version, *PLAN)
    stack.wait_ready(one)
    with Sessions(stack.gateway) as sessions:
        drift = stack.say("drift", f"{MODEL}@{version}", "--reference", str(reference), "--no-log", codes=(0, 1))
        ask = quality_stopped_early if mode is Mode.QUICK else quality_in_full
        quality = ask(stack.config, champion, version, weights.path)
        verdicts = _verdicts(drift, quality)
        seconds = time.monotonic() - began_s
        document = {"fault": asdict(one), "drift": drift, "quality": asdict(quality), "not judged": list(NOT_JUDGED)}
        digest = stack.record(version, verdicts, document)
        standing, needed_approval = _settled(stack, version, digest)
    trial = Trial(
        planted=one,
        outcome=standing["phase"] if Phase(standing["phase"]).is_over else "held",
        reason=standing["reason"],
        largest_share=stack.largest_share(standing["rollout_id"]),
        needed_approval=needed_approval,
        num_served=(sessions.versions.total(), sessions.versions[version]),
        num_failed=sessions.num_failed,
        verdicts={gate.value: verdict.value for gate, verdict in verdicts.items()},
        drift=drift["action"],
        kl_mean=drift["kl_mean"],
        found_by_prompts=drift["found_by_prompts"],
        first_difference=drift["first_difference"],
        quality=quality,
        seconds=seconds,
    )
    _clean_up(stack, standing)
    return trial


def _verdicts(drift: Mapping[str, Any], quality: Found) -> dict[Gate, Verdict]:
    seen = DriftFound(
        drift["action"], drift["kl_mean"], drift["kl_p"], drift["agreement_frac"], tuple(drift["reasons"]),
        tuple(drift["not_seen"]),
    )  # fmt: skip
    said = judge(Gate.DRIFT, GateEvidence(drift=seen), GatePolicy(), quality.verdict).verdict
    return {**dict.fromkeys(NOT_JUDGED, Verdict.PASS), Gate.QUALITY: quality.verdict, Gate.DRIFT: said}


def _settled(stack: PlantedStack, version: str, digest: str) -> tuple[dict[str, Any], bool]:
    """Where the rollout comes to rest, and whether it asked for the approval that it then got."""
    needed_approval = False
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    moved_s, seen = time.monotonic(), ""
    while True:
        standing = stack.standing()
        assert standing is not None
        now_s, state = time.monotonic(), f"{standing['phase']} {standing['share_frac']}"
        moved_s, seen = (moved_s if state == seen else now_s), state
        asks = any("approval" in one for one in standing["waits_for"])
        if asks and not needed_approval and len(standing["waits_for"]) == 1:
            stack.approve(version, digest)
            needed_approval = True
        if Phase(standing["phase"]).is_over or now_s - moved_s > HELD_AFTER_S or now_s > deadline_s:
            return standing, needed_approval
        time.sleep(LOOK_EVERY_S)


def _clean_up(stack: PlantedStack, standing: Mapping[str, Any]) -> None:
    """The sound model is champion again, and the candidate's pool ends."""
    if standing["phase"] != Phase.ROLLED_BACK.value:
        stack.say("canary", "rollback", MODEL)
        _until_rolled_back(stack)
    for pool in standing["plan"]["pools"]:
        if pool in {one.pool_id for one in stack.config.pools}:
            stack.say("pool", "stop", pool)


def _until_rolled_back(stack: PlantedStack) -> None:
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while (stack.standing() or {}).get("phase") != Phase.ROLLED_BACK.value:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the rollout did not end within {SETTLE_TIMEOUT_S:g} s: {stack.standing()}")
        time.sleep(LOOK_EVERY_S)


def _path(one: Planted, mode: Mode, base: Weights) -> Path:
    key = readings.digest([base.digest, flags().model_dump(mode="json"), readings.PROTOCOL, mode.value])
    return FOLDER / "trials" / f"{one.name}-{mode.value}-{key[:16]}.json"


def _keep(trial: Trial, mode: Mode, base: Weights) -> None:
    path = _path(trial.planted, mode, base)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(_TRIAL.dump_json(trial, indent=1))
    partial.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    return run("planted_regressions", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
