"""What the default guardrails take of a request with a prompt of 1,000 tokens: CPU time on the gateway's event loop.

Texts of 4,400 characters, at 4.4 a token of English: prose, code, prose in several scripts, a list of figures, prose
that holds personal data, and prose under a blocklist of 1,000 phrases with five patterns of the configuration's own.
Rounds go over all of them in turn; a figure is the median of its rounds. Beside each round the same body is parsed by
the standard library, which the gateway does anyway: a reference for how fast the machine was.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from rich.console import Console

from benchmarks.harness import Bar, Mode, at_most, run
from serving.core.errors import ContentBlocked
from serving.core.policies.guardrails import GuardrailSettings
from serving.core.tenancy import Tenant
from serving.gateway.guardrails.screen import Guardrails

NUM_CHARS = 4400
MAX_US = 1000.0
NUM_ROUNDS = {Mode.QUICK: 60, Mode.FULL: 600}
NUM_CALLS = 5
TENANT = Tenant("t")

PROSE = "The river rises in the hills, and by noon the mill that stands below the bridge has water enough to turn. "
TEXTS = {
    "prose": PROSE,
    "code": "for (int i = 0; i < num_rows; i++) { total += rows[i].price * rows[i].count; }  // see §3\n",
    "many scripts": "Größe und Maß — река течёт — 川は流れる — το ποτάμι — हिन्दी पाठ — ❤️ 👩‍💻 naïve café. ",
    "figures": "2024-03-18, 17.25, 1 482 991, -0.0031, 98%, 10:45; ",
    "personal data": PROSE + "Write to ann.lee@example.org or call +44 20 7946 0958; card 4111 1111 1111 1111. ",
}
OWN = GuardrailSettings(
    blocklist=tuple(f"forbidden phrase number {number}" for number in range(1000)),
    patterns={f"ticket-{name}": rf"\b{name}-[0-9]{{4,8}}\b" for name in ("ab", "cd", "ef", "gh", "ij")},
)


def measure(mode: Mode, console: Console) -> Sequence[Bar]:
    """CPU time of the default guardrails for prompts of 1,000 tokens."""
    default, own = Guardrails(GuardrailSettings()), Guardrails(OWN)
    cases = {name: (default, body_of(text)) for name, text in TEXTS.items()}
    cases["prose, own lists"] = own, body_of(PROSE)
    took: dict[str, list[float]] = {name: [] for name in cases}
    parsed: list[float] = []
    for _ in range(NUM_ROUNDS[mode]):
        for name, (guardrails, raw) in cases.items():
            parsed.append(cpu_us(partial(json.loads, raw)))
            took[name].append(cpu_us(partial(check, guardrails, raw)) - parsed[-1])
    console.print(f"reference: the standard library parses such a body in {median(parsed):.0f} µs")
    return [at_most(f"{name}: µs of CPU", median(figures), MAX_US) for name, figures in took.items()]


def body_of(text: str) -> str:
    """A chat request of `NUM_CHARS` characters, as JSON."""
    content = (text * (NUM_CHARS // len(text) + 1))[:NUM_CHARS]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]})


def check(guardrails: Guardrails, raw: str) -> None:
    """Parses the body and looks at it; parsed anew each time, for what is redacted is changed in place."""
    try:
        if guardrails.check(TENANT, json.loads(raw)) is None:
            raise RuntimeError("the guardrails left the loop: these texts are meant to be looked at on it")
    except ContentBlocked:
        return


def cpu_us(work: Callable[[], object]) -> float:
    """CPU time of this thread for one call, the mean of a few in a row."""
    began_ns = time.thread_time_ns()
    for _ in range(NUM_CALLS):
        work()
    return (time.thread_time_ns() - began_ns) / NUM_CALLS / 1000


if __name__ == "__main__":
    sys.exit(run("guardrails_cost", measure))
