"""From what is kept of two versions to a gate's record, with what only people look at beside it."""

from __future__ import annotations

import difflib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from serving.control.registered import ENGINE_PART, RegisteredVersion
from serving.core.gate_record import GateRecord, Source, Subject
from serving.core.policies.gate import DriftFound, Gate, GateEvidence, GatePolicy
from serving.core.state import Task
from workbench.config import WorkbenchConfig
from workbench.gates import evaluated, measured
from workbench.gates.evaluated import Flip, SuiteRuns, flips
from workbench.gates.kept import Kept, KeptEvaluation, cell_sources
from workbench.provenance import git_commit
from workbench.run_fields import flat
from workbench.wiring import running_stack

COMPARED_FILES = ("generation_config.json", "config.json", "tokenizer_config.json")
TEMPLATE = "chat template"
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Gathered:
    """A record, and what its page shows beside it.

    Attributes:
        files: the kept files that figures were taken from.
        flips: items that changed, from evaluation sets alone.
        template_diff: lines of a unified diff of the chat templates; empty where they are equal or unknown.
    """

    record: GateRecord
    files: tuple[Path, ...]
    flips: tuple[Flip, ...]
    template_diff: tuple[str, ...]


def gather(
    config: WorkbenchConfig,
    champion: RegisteredVersion,
    candidate: RegisteredVersion,
    *,
    announced: str = "",
) -> Gathered:
    """Everything that is kept of the two, as evidence under the configuration's policy.

    Args:
        config: whose data folder, prices, guardrails and policy.
        champion: what the candidate is held against.
        candidate: another version of the same model.
        announced: why a large change is meant; a block by drift passes with it alone.

    Raises:
        BadRequest, ResultsBroken: a kept file cannot be read.
        UnknownMetric: nobody knows which way a metric of the policy is better.
    """
    policy = measured.metrics_of(config.gates.policy(), candidate.task or Task.GENERATE)
    sides = [Kept(config, one.name, one.version, policy.suites) for one in (champion, candidate)]
    pairs = [_suite(sides[0], sides[1], suite) for suite in policy.suites]
    runs = [SuiteRuns(suite, *(None if one is None else one.evaluation for one in found)) for suite, found in pairs]
    cells = [side.cells() for side in sides]
    now_s = time.time()
    drift, drift_sources, drift_files = _drift(sides[0], sides[1], announced, now_s)
    plain = [[one.result for one in of_side] for of_side in cells]
    evidence = {
        Gate.PERFORMANCE: measured.performance(plain[0], plain[1], policy, now_s),
        Gate.COST: measured.cost(cells[0], cells[1], config.hardware, policy, now_s),
        Gate.QUALITY: _aged(evaluated.quality(runs, policy), runs, now_s),
        Gate.DRIFT: drift,
        Gate.SAFETY: _aged(evaluated.safety(runs, policy, config.gateway.guardrails.settings()), runs, now_s),
    }
    strangers = [
        text for one, side in zip((champion, candidate), sides, strict=True) for text in _other_weights(one, side)
    ]
    evidence = {gate: replace(one, doubts=(*strangers, *one.doubts)) for gate, one in evidence.items()}
    folders = [_weights_folder(config, side) for side in sides]
    kept = [one for _, found in pairs for one in found if one is not None]
    record = GateRecord(
        model=candidate.name,
        champion=_subject(champion, sides[0]),
        candidate=_subject(candidate, sides[1]),
        policy=policy,
        evidence=evidence,
        gathered_at=datetime.fromtimestamp(now_s, UTC).isoformat(timespec="seconds"),
        commit=git_commit(),
        sources=(*(one.source for one in kept), *drift_sources, *cell_sources([*cells[0], *cells[1]])),
        differences=_differences(champion, candidate, sides) | _file_differences(folders[0], folders[1]),
    )
    files = (*(one.path for one in kept), *drift_files)
    return Gathered(record, files, tuple(flips(runs)), tuple(_template_diff(folders[0], folders[1])))


def _other_weights(version: RegisteredVersion, kept: Kept) -> list[str]:
    """Results that are kept of a version whose number other weights had, as after MLflow was emptied, say nothing."""
    measured, registered = kept.covers().get("weights_digest"), version.digest
    if not kept.covers() or registered is None or registered.partition(ENGINE_PART)[0] == measured:
        return []
    return [f"what is kept of {version.name}@{version.version} is of weights {measured}, not of {registered}"]


Found = tuple[KeptEvaluation | None, KeptEvaluation | None, KeptEvaluation | None]


def _suite(champion: Kept, candidate: Kept, suite: str) -> tuple[str, Found]:
    """The suite as the champion, the candidate, and the champion before were asked it."""
    theirs = candidate.evaluated(suite)
    mine = champion.evaluated(suite, None if theirs is None else theirs.evaluation)
    return suite, (mine, theirs, None if mine is None else champion.before(mine.evaluation))


def _aged(evidence: GateEvidence, runs: list[SuiteRuns], now_s: float) -> GateEvidence:
    """With the age of the oldest evaluation."""
    began = [
        datetime.fromisoformat(one.started_at).timestamp()
        for run in runs
        for one in (run.champion, run.candidate)
        if one is not None
    ]
    return replace(evidence, age_s=max(0.0, now_s - min(began))) if began else evidence


def _drift(
    champion: Kept, candidate: Kept, announced: str, now_s: float
) -> tuple[GateEvidence, tuple[Source, ...], tuple[Path, ...]]:
    kept = candidate.drift()
    if kept is None:
        return GateEvidence(), (), ()
    found = kept.found
    drift = DriftFound(
        action=str(found["action"]),
        kl_mean=float(found["kl_mean"]),
        kl_p=float(found["kl_p"]),
        agreement_frac=float(found["agreement_frac"]),
        reasons=tuple(found["reasons"]),
        not_seen=tuple(found["not_seen"]),
        announced=announced,
    )
    doubts = []
    if found["reference_engine"] != champion.engine:
        doubts.append(
            f"its reference is of another engine than the champion's: `workbench drift {champion.model}@"
            f"{champion.version} --take-reference`, then check the candidate against that file"
        )
    age_s = max(0.0, now_s - datetime.fromisoformat(found["checked_at"]).timestamp())
    return GateEvidence((), tuple(doubts), age_s, drift), (kept.source,), (kept.path,)


def _subject(version: RegisteredVersion, kept: Kept) -> Subject:
    return Subject(version.version, version.digest, version.source, kept.engine)


def _differences(
    champion: RegisteredVersion, candidate: RegisteredVersion, sides: list[Kept]
) -> dict[str, tuple[str, str]]:
    """Of weights, source and engine, by name."""
    registered = [
        {"weights.source": one.source or ABSENT, "weights.digest": one.digest or ABSENT}
        for one in (champion, candidate)
    ]
    covered = [flat("engine", side.covers()) for side in sides]
    if not all(covered):  # one side was never measured: everything would seem to differ
        covered = [{}, {}]
    return _unequal(registered[0] | covered[0], registered[1] | covered[1])


def _file_differences(champion: Path | None, candidate: Path | None) -> dict[str, tuple[str, str]]:
    if champion is None or candidate is None:
        return {}
    told = [
        {TEMPLATE: _short(template(folder)), **{name: _short(_text(folder / name)) for name in COMPARED_FILES}}
        for folder in (champion, candidate)
    ]
    return _unequal(told[0], told[1])


def _unequal(mine: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = sorted({*mine, *theirs})
    pairs = {name: (mine.get(name, ABSENT), theirs.get(name, ABSENT)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _template_diff(champion: Path | None, candidate: Path | None) -> list[str]:
    if champion is None or candidate is None:
        return []
    before, after = ((template(folder) or "").splitlines() for folder in (champion, candidate))
    return list(difflib.unified_diff(before, after, "champion", "candidate", lineterm="", n=2))


def template(folder: Path) -> str | None:
    """The chat template of a model's folder; None without one."""
    if (own := _text(folder / "chat_template.jinja")) is not None:
        return own
    config = _text(folder / "tokenizer_config.json")
    found = None if config is None else json.loads(config).get("chat_template")
    return None if found is None else found if isinstance(found, str) else json.dumps(found, sort_keys=True)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _short(text: str | None) -> str:
    return ABSENT if text is None else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _weights_folder(config: WorkbenchConfig, side: Kept) -> Path | None:
    """Where the running stack has the weights that were measured; None when it does not say."""
    state, digest = running_stack(config), side.covers().get("weights_digest")
    if state is None or digest is None:
        return None
    for facts in state.pools.values():
        if facts.weights_path is not None and facts.engine_covers.get("weights_digest") == digest:
            return Path(facts.weights_path)
    return None


def asked_of(policy: GatePolicy) -> str:
    """A sentence of what the policy asks, for people."""
    return (
        f"performance within {100 * policy.performance_tolerance:g} %, cost within {100 * policy.cost_tolerance:g} %, "
        f"accuracy over {', '.join(policy.suites)} within {100 * policy.quality_tolerance:g} points, refusals and "
        f"guardrail trips within {100 * policy.safety_tolerance:g} points, failed requests within "
        f"{100 * policy.failures_tolerance:g} points, nothing older than {policy.max_age_days:g} days"
    )
