"""The gate's page: one self-contained HTML file by which a release manager decides in two minutes.

    verdict → the digest to approve → each gate → figures → what flipped → what differs → what it rests on

It loads nothing, runs no script, and reads on a phone. Every figure lies on one scale, in tolerances: the line in the
middle is "as the champion", the one to its right the tolerance, and a bar that ends left of that passes.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from serving.core import gate_record
from serving.core.gate_record import GateRecord
from serving.core.policies.gate import DriftFound, Figure, Gate, GateEvidence, GateVerdict, Judged, Part, Scale
from serving.core.sequential import Verdict
from workbench.gates.evaluated import Flip
from workbench.gates.gather import Gathered, asked_of
from workbench.gates.page_style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
SIGNS = {Verdict.PASS: "✓", Verdict.FAIL: "✕", Verdict.INCONCLUSIVE: "?"}
WORDS = {
    Verdict.PASS: "All gates pass. It may be approved.",
    Verdict.FAIL: "It is worse than the champion. It must not go on.",
    Verdict.INCONCLUSIVE: "Not shown to be good enough. It waits until what is missing is measured.",
}
ABOUT = {
    Gate.PERFORMANCE: "Speed under each load, and requests that failed",
    Gate.COST: "What a token costs",
    Gate.QUALITY: "Right answers, item by item, on the same items",
    Gate.DRIFT: "Has it changed, and how much",
    Gate.SAFETY: "Refusals and guardrail trips among its answers",
}
SAID = {Verdict.PASS: "within the tolerance", Verdict.FAIL: "not within the tolerance"}
SPAN = 2.0  # tolerances from the middle of a track to its end
MAX_SHOWN = 8
MAX_TEXT_CHARS = 600


def write_page(gathered: Gathered, data: bytes, path: Path) -> None:
    """Writes the page of a record whose bytes are `data`, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page(gathered, data), encoding="utf-8")
    partial.replace(path)


def page(gathered: Gathered, data: bytes) -> str:
    """The page's HTML."""
    record, said = gathered.record, gathered.record.verdicts()
    title = f"{record.model}@{record.candidate.version} against @{record.champion.version}"
    body = "".join(
        [
            f"<header class='{said.verdict}'><p class='verdict'>{SIGNS[said.verdict]} {said.verdict}</p>"
            f"<h1>{_e(title)}</h1><p>{WORDS[said.verdict]} Judged {_e(_time(record))}.</p></header>",
            _decide(record, said.verdict, gate_record.digest(data)),
            f"<nav>{''.join(_chip(gate, said.gates[gate]) for gate in Gate)}</nav>",
            "<p class='key'><span class='middle'></span> as the champion <span class='limit'></span> the tolerance "
            "<span class='bar'></span> 95 % interval; to the right is worse</p>",
            *(_gate(gate, said.gates[gate], record) for gate in Gate),
            _flips(gathered.flips),
            _differences(record, gathered.template_diff),
            _rests_on(record, said.mistakes),
        ]
    )
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{_e(title)}</title>'
        f"<style>{STYLE}</style>"
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"


def approve_command(record: GateRecord, digest: str) -> str:
    """What a release manager types to approve."""
    shown = digest[: gate_record.MIN_APPROVAL_DIGITS]
    return f"workbench canary approve {record.model}@{record.candidate.version} --digest {shown}"


def _decide(record: GateRecord, verdict: Verdict, digest: str) -> str:
    reject = f'workbench canary reject {record.model}@{record.candidate.version} --reason "…"'
    approve = (
        f"<p>Approve exactly this evidence:</p><pre>{_e(approve_command(record, digest))}</pre>"
        if verdict is Verdict.PASS
        else "<p>There is nothing to approve: the rollout waits for a pass, whatever is approved.</p>"
    )
    return (
        f"<section class='decide'><p>Digest of the evidence</p><p class='digest'><b>{digest[:16]}</b>{digest[16:]}</p>"
        f"{approve}<p>Or take it out, with a reason:</p><pre>{_e(reject)}</pre></section>"
    )


def _chip(gate: Gate, found: GateVerdict) -> str:
    return f"<a class='{found.verdict}' href='#{gate}'><b>{SIGNS[found.verdict]}</b> {gate}</a>"


def _gate(gate: Gate, found: GateVerdict, record: GateRecord) -> str:
    evidence = record.evidence.get(gate, GateEvidence())
    rows = _ordered(found.figures)
    tolerances = record.policy.asked(gate)
    shown = "".join(_row(one, tolerances.get(one.figure.of)) for one in rows[:MAX_SHOWN])
    rest = "".join(_row(one, tolerances.get(one.figure.of)) for one in rows[MAX_SHOWN:])
    more = f"<details><summary>{len(rows) - MAX_SHOWN} more</summary>{rest}</details>" if rest else ""
    drift = "" if evidence.drift is None else _drift(evidence.drift)
    return (
        f"<section id='{gate}'><h2><span class='{found.verdict}'>{SIGNS[found.verdict]} {found.verdict}</span> "
        f"{gate.capitalize()}</h2><p class='quiet'>{ABOUT[gate]}</p><p>{_e(_why(found, evidence))}.</p>"
        f"{drift}{shown}{more}</section>"
    )


def _why(found: GateVerdict, evidence: GateEvidence) -> str:
    """The reason, in short where the figures below say it."""
    counted = [one for one in found.figures if one.figure.part is not Part.SHOWN]
    alike = sum(one.verdict is found.verdict for one in counted)
    if evidence.doubts or not alike or found.verdict is Verdict.PASS:
        return _capital(found.reason)
    return f"{alike} of {len(counted)} figures {'are worse' if found.verdict is Verdict.FAIL else 'are open'}"


def _ordered(figures: Sequence[Judged]) -> list[Judged]:
    """What fails first, then what is open; what is only shown comes last."""
    order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
    return sorted(figures, key=lambda one: (one.figure.part is Part.SHOWN, order.index(one.verdict)))


def _row(one: Judged, tolerance: float | None) -> str:
    figure = one.figure
    kind = "shown" if figure.part is Part.SHOWN else one.verdict
    if figure.worse is None or figure.champion is None or figure.candidate is None:
        return f"<div class='row missing {kind}'><p><b>{_e(figure.name)}</b>  {_e(one.reason)}</p></div>"
    values = f"{_value(figure.champion, figure.unit)} → {_value(figure.candidate, figure.unit)}"
    said = SAID.get(one.verdict, one.reason)
    said = one.reason if figure.part is not Part.DECIDES else said
    return (
        f"<div class='row {kind}'><p><b>{_e(figure.name)}</b> <span>{_e(values)}</span></p>"
        f"{_track(figure, tolerance)}<p class='quiet'>{_e(_moved(figure))}<br> {_e(said)}</p></div>"
    )


def _track(figure: Figure, tolerance: float | None) -> str:
    """Zero in the middle, the tolerance at three quarters; what lies further out ends in an arrow."""
    if tolerance is None or figure.worse is None:
        return "<div></div>"
    low, high = (end / tolerance for end in figure.interval or (figure.worse, figure.worse))
    left, right, at = _place(low), _place(high), _place(figure.worse / tolerance)
    arrows = ("<i class='left'>◂</i>" if low < -SPAN else "") + ("<i class='right'>▸</i>" if high > SPAN else "")
    dot = f"<i class='dot' style='left:{at:.1f}%'></i>" if abs(figure.worse) < SPAN * tolerance else ""
    return (
        f"<div class='track' role='img' aria-label='{_e(_moved(figure))}'><i class='middle'></i><i class='limit'></i>"
        f"<i class='bar' style='left:{left:.1f}%;width:{max(right - left, 0.6):.1f}%'></i>"
        f"{dot}{arrows}</div>"
    )


def _place(in_tolerances: float) -> float:
    return 50.0 + 49.0 * max(-1.0, min(1.0, in_tolerances / SPAN))


def _moved(figure: Figure) -> str:
    """`3.1 % worse [+1.0, +5.2]`, where a negative end is better."""
    unit = "%" if figure.scale is Scale.RATIO else "points"
    worse = 100.0 * (figure.worse or 0.0)
    side = "worse" if worse > 0.0 else "better"
    said = "no change" if abs(worse) < 0.05 else f"{abs(worse):.1f} {unit} {side}"
    if figure.interval is None:
        return said
    low, high = (round(100.0 * end, 1) + 0.0 for end in figure.interval)  # + 0.0: no negative zero
    return f"{said} [{low:+.1f}, {high:+.1f}]"


def _value(value: float, unit: str) -> str:
    if unit == "share":
        return f"{100.0 * value:.1f} %"
    if unit == "s":
        return f"{1000.0 * value:.4g} ms" if value < 1.0 else f"{value:.3g} s"
    return f"${value:.4g}" if unit == "USD" else f"{value:.4g}{f' {unit}' if unit else ''}"


def _drift(found: DriftFound) -> str:
    announced = f"<p>Announced: {_e(found.announced)}</p>" if found.announced else ""
    return (
        f"<p>Next-token KL {found.kl_mean:.4f} nats (p {found.kl_p:.2g}); "
        f"{100.0 * found.agreement_frac:.0f} % of greedy answers equal; outcome <b>{_e(found.action)}</b>.</p>"
        f"{announced}"
    )


def _flips(found: Sequence[Flip]) -> str:
    told = "From evaluation sets alone, never from a user's traffic."
    cards = "".join(map(_card, found)) or "<p class='quiet'>No item changed, or none was asked of both.</p>"
    return f"<section><h2>Flipped examples</h2><p class='quiet'>{told}</p>{cards}</section>"


def _card(flip: Flip) -> str:
    said, classes = ("lost", ("good", "bad")) if flip.is_lost else ("won", ("bad", "good"))
    answers = (("champion", flip.champion), ("candidate", flip.candidate))
    sides = "".join(
        f"<div class='{kind}'><p>{side}</p>{_answer(answer)}</div>"
        for kind, (side, answer) in zip(classes, answers, strict=True)
    )
    return (
        f"<article><p><b>{said}</b> {_e(flip.task)}, suite {_e(flip.suite)}</p>"
        f"<blockquote>{_text(flip.prompt, 'this item is no longer made')}</blockquote>"
        f"<p class='quiet'>right is: {_text(flip.gold, 'unknown')}</p><div class='sides'>{sides}</div></article>"
    )


def _answer(answer: str | None) -> str:
    if answer is None:
        return "<p class='quiet'>asked for likelihoods; no text</p>"
    return f"<pre>{_text(answer, '(empty)')}</pre>"


def _differences(record: GateRecord, template_diff: Sequence[str]) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{_e(name)}</th><td>{_e(old)}</td><td>{_e(new)}</td></tr>"
        for name, (old, new) in sorted(record.differences.items())
    )
    table = (
        f"<table><thead><tr><th></th><th>champion</th><th>candidate</th></tr></thead><tbody>{rows}</tbody></table>"
        if rows
        else "<p class='quiet'>None that is known: same weights, flags and template, or neither was measured.</p>"
    )
    diff = "".join(f"<span class='{_side(line)}'>{_e(line)}\n</span>" for line in template_diff)
    shown = f"<h3>Chat template</h3><pre class='diff'>{diff}</pre>" if diff else ""
    return f"<section><h2>What differs from the champion</h2>{table}{shown}</section>"


def _side(line: str) -> str:
    return "new" if line.startswith("+") else "old" if line.startswith("-") else "same"


def _rests_on(record: GateRecord, mistakes: Sequence[str]) -> str:
    tested = (
        f"The gates failed their own test: {_e('; '.join(mistakes))}."
        if mistakes
        else "Before judging, each gate failed its planted drop, left its open case open and passed a clean one."
    )
    sources = "".join(_sources(record))
    return (
        f"<section><h2>What it rests on</h2><p>Asked: {_e(asked_of(record.policy))}.</p><p>{tested}</p>"
        f"<p class='quiet'>Judged {_e(_time(record))} by code {_e(record.commit)}; policy "
        f"{record.policy.digest[:16]}.</p><details><summary>Sources: {len(record.sources)}</summary><ul>{sources}</ul>"
        "</details></section>"
    )


def _sources(record: GateRecord) -> Iterator[str]:
    for one in record.sources:
        run = f", MLflow run {_e(one.run_id)}" if one.run_id else ""
        yield f"<li>{_e(one.kind)}: {_e(one.what)}{run} <span class='quiet'>sha256 {_e(one.sha256[:16])}</span></li>"


def _time(record: GateRecord) -> str:
    return f"{datetime.fromisoformat(record.gathered_at):%Y-%m-%d %H:%M} UTC"


def _text(text: str, absent: str) -> str:
    if not text.strip():
        return f"<span class='quiet'>{_e(absent)}</span>"
    cut = text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " …"
    return _e(cut)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _e(text: str) -> str:
    return html.escape(text, quote=True)
