"""Arrivals and workloads from their short form, as the command line and notebooks take them.

    closed:concurrency=8               chat:prompt=64,output=32
    constant:rate=4                    completion:prompt=16-256,output=lognormal/64/1
    poisson:rate=4                     sharedprefix:prefix=512,prompt=64,prefixes=4
    gamma:rate=4,cv=2                  sessions:turns=4,think=2
    diurnal:mean=2,peak=6,period=3600  agents:turns=8,prompt=512,growth=256
    ramp:from=1,to=10,seconds=60       tools:tools=4
    steps:rates=1/2/4,seconds=30       embed:prompt=64
    trace:FILE,scale=10                trace:FILE · lengths:FILE · file:FILE · dataset:PATH,prompt=COLUMN

Every workload also takes `tiers=priority:1/default:3` and `adapters=base:1/french:1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.core.state import Task
from workbench.loadgen.arrivals import (
    MAX_IN_FLIGHT,
    Arrival,
    ClosedLoop,
    Constant,
    Diurnal,
    Gamma,
    Poisson,
    Profile,
)
from workbench.loadgen.chat_frame import Asks, ChatFrame, FrameNeed, ask_chat_frame
from workbench.loadgen.lengths import Empirical, Independent, parse_lengths
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.specs import Spec, SpecError, parse_spec, shares
from workbench.loadgen.trace_files import read_trace
from workbench.loadgen.trace_prompts import TraceWorkload
from workbench.loadgen.traces import Trace, TraceError
from workbench.loadgen.user_rows import UserWorkload, read_dataset, read_rows
from workbench.loadgen.vocabulary import Vocabulary, WorkloadError
from workbench.loadgen.workloads import Embeddings, Form, Synthetic, mixed

ARRIVALS = ("closed", "constant", "poisson", "gamma", "diurnal", "ramp", "steps", "trace")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "completion": {},
    "chat": {"form": Form.CHAT},
    "sharedprefix": {"prefix": 512},
    "sessions": {"turns": 4},
    "agents": {"turns": 8, "prompt": "512", "growth": "256"},
    "tools": {"form": Form.CHAT, "tools": 4},
    "lengths": {},
}
WORKLOADS = (*_DEFAULTS, "embed", "trace", "file", "dataset")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, ready to make its prompts. `spec` is its short form."""

    spec: str
    maker: Synthetic | Embeddings | TraceWorkload | UserWorkload
    tiers: Mapping[str, float] = field(default_factory=dict)
    adapters: Mapping[str, float] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """Which kind of request."""
        if isinstance(self.maker, UserWorkload):
            return self.maker.task
        return Task.EMBED if isinstance(self.maker, Embeddings) else Task.GENERATE

    @property
    def frame_need(self) -> FrameNeed | None:
        """What the server must be asked before prompts can be made; None when nothing."""
        return self.maker.frame_need

    @property
    def needs_vocabulary(self) -> bool:
        """Whether the model's tokenizer must be at hand; the user's own prompts go without."""
        return not isinstance(self.maker, UserWorkload)

    def prompts(self, vocabulary: Vocabulary | None, *, seed: int, frame: ChatFrame | None = None) -> Iterator[Prompt]:
        """The prompts, tiers and adapters drawn.

        Raises:
            WorkloadError: they cannot be made.
        """
        if isinstance(self.maker, UserWorkload):
            made = self.maker.prompts(vocabulary, seed=seed)
        elif vocabulary is None:
            raise WorkloadError(f"{self.spec!r} needs the model's tokenizer, for its lengths are exact")
        else:
            made = self.maker.prompts(vocabulary, seed=seed, frame=frame)
        return mixed(made, tiers=self.tiers, adapters=self.adapters, seed=seed)

    async def prompts_for(
        self, client: Asks, model: str, vocabulary: Vocabulary | None, *, seed: int
    ) -> Iterator[Prompt]:
        """As `prompts`, with the chat frame asked from the server where it is needed.

        Raises:
            WorkloadError: they cannot be made.
            UpstreamError: the server does not tell its chat frame.
        """
        frame = None
        if self.frame_need is not None and vocabulary is not None:
            frame = await ask_chat_frame(client, model, vocabulary, self.frame_need)
        return self.prompts(vocabulary, seed=seed, frame=frame)


def parse_arrival(text: str) -> Arrival:
    """An arrival from its short form.

    Raises:
        SpecError: it cannot be read; the message says what would be right.
    """
    spec = parse_spec(text, ARRIVALS)
    try:
        arrival = _arrival(spec)
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"{text!r}: {error}") from None
    spec.end(subject=spec.kind == "trace")
    return arrival


def _arrival(spec: Spec) -> Arrival:
    if spec.kind == "closed":
        return ClosedLoop(spec.whole("concurrency"))
    most = {"max_in_flight": spec.whole("max_in_flight", MAX_IN_FLIGHT)}
    match spec.kind:
        case "constant":
            return Constant(_rate(spec), **most)
        case "poisson":
            return Poisson(_rate(spec), **most)
        case "gamma":
            return Gamma(_rate(spec), _cv(spec), **most)
        case "diurnal":
            mean, peak = spec.number("mean", above=True), spec.number("peak", above=True)
            return Diurnal(mean, peak, spec.number("period", 86400.0, above=True), spec.number("start", 0.0), **most)
        case "ramp":
            start, end = spec.number("from"), spec.number("to")
            return Profile.ramp(start, end, spec.number("seconds", above=True), **most)
        case "steps":
            rates = spec.value("rates", _rates)
            return Profile.steps(rates, spec.number("seconds", above=True), **most)
    return _trace(spec).arrival(scale=spec.number("scale", 1.0, above=True), **most)


def _rate(spec: Spec) -> float:
    return spec.number("rate", above=True)


def _cv(spec: Spec) -> float:
    """The gaps' variation, by itself or as the shape 1 / cv² that other tools call burstiness."""
    if not spec.has("burstiness"):
        return spec.number("cv", above=True)
    if spec.has("cv"):
        raise SpecError(f"{spec.text!r} has both cv= and burstiness= (1 / cv²); give one")
    return float(spec.number("burstiness", above=True) ** -0.5)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split("/")]
    except ValueError:
        raise SpecError(f"{text!r} is no list of rates as in 1/2/4") from None
    return rates


def _trace(spec: Spec) -> Trace:
    """The trace of a spec: `skip` leaves out the first, `limit` takes so many."""
    try:
        trace = read_trace(spec.need_subject("file"))
        skip = spec.whole("skip", 0, least=0)
        trace = trace.part(skip, spec.whole("limit", len(trace.requests)))
        return trace.shortened(spec.number("lengths", 1.0, above=True)) if spec.has("lengths") else trace
    except TraceError as error:
        raise SpecError(f"{spec.text!r}: {error}") from None


def parse_workload(text: str) -> Workload:
    """A workload from its short form; files are read now.

    Raises:
        SpecError: it cannot be read; the message says what would be right.
    """
    spec = parse_spec(text, WORKLOADS)
    none: Mapping[str, float] = {}
    mixes = {name: spec.value(name, shares, none) for name in ("tiers", "adapters")}
    try:
        maker = _maker(spec)
    except (WorkloadError, TraceError) as error:
        raise SpecError(f"{text!r}: {error}") from None
    spec.end(subject=spec.kind in ("trace", "lengths", "file", "dataset"))
    return Workload(text, maker, **mixes)


def _maker(spec: Spec) -> Synthetic | Embeddings | TraceWorkload | UserWorkload:
    match spec.kind:
        case "embed":
            return Embeddings(spec.value("prompt", parse_lengths, parse_lengths("64")))
        case "trace":
            spec.has("scale")  # of its arrival: the same words may name both
            spec.fields.pop("scale", None)
            return TraceWorkload(_trace(spec), spec.value("form", _form, Form.IDS))
        case "file":
            limit = spec.whole("limit") if spec.has("limit") else None
            return _user_workload(spec, read_rows(Path(spec.need_subject("file")), limit))
        case "dataset":
            limit = spec.whole("limit") if spec.has("limit") else None
            columns = {n: spec.value(n, str) for n in ("prompt", "messages", "input", "max_tokens") if spec.has(n)}
            source, split = spec.need_subject("path"), spec.value("split", str, "train")
            return _user_workload(spec, read_dataset(source, split=split, columns=columns, limit=limit))
    return _synthetic(spec)


def _user_workload(spec: Spec, rows: Any) -> UserWorkload:
    return UserWorkload(
        rows,
        spec.whole("output", 128),
        spec.value("repeat", _yes, False),
        not spec.value("exact", _yes, False),
    )


def _synthetic(spec: Spec) -> Synthetic:
    usual = _DEFAULTS[spec.kind]
    if spec.kind == "lengths":
        shapes: Any = Empirical(tuple((r.num_prompt_tokens, r.num_output_tokens) for r in _trace(spec).requests))
    else:
        prompt = spec.value("prompt", parse_lengths, parse_lengths(usual.get("prompt", "64")))
        shapes = Independent(prompt, spec.value("output", parse_lengths, parse_lengths("32")))
    growth = parse_lengths(usual["growth"]) if "growth" in usual else None
    return Synthetic(
        shapes,
        form=spec.value("form", _form, usual.get("form", Form.IDS)),
        num_prefix_tokens=spec.whole("prefix", usual.get("prefix", 0), least=0),
        num_prefixes=spec.whole("prefixes", 1),
        num_turns=spec.whole("turns", usual.get("turns", 1)),
        growth=spec.value("growth", parse_lengths) if spec.has("growth") else growth,
        think_s=spec.number("think", 0.0),
        num_tools=spec.whole("tools", usual.get("tools", 0), least=0),
        tool_choice=spec.value("tool_choice", str, "none"),
    )


def _form(text: str) -> Form:
    try:
        return Form(text)
    except ValueError:
        raise SpecError(f"{text!r} is neither ids nor chat") from None


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise SpecError(f"{text!r} is neither yes nor no")
    return text == "yes"
