"""What load to put on which model, and how many requests that is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice, takewhile

from serving.core.state import Task
from workbench.loadgen import (
    Arrival,
    ClosedLoop,
    Slo,
    Synthetic,
    TargetKind,
    Workload,
    parse_arrival,
    parse_workload,
)

MIN_REQUESTS = 32
REQUESTS_A_USER = 8
MAX_PLANNED = 1_000_000


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What load to put on which model.

    Attributes:
        model: a served name, `name@version` for another than the champion; with `url` the name to send.
        load: an arrival's short form.
        workload: a workload's short form; completions (or inputs to embed) of one length when None.
        num_prompt_tokens, num_output_tokens: of that usual workload.
        num_requests: at most; by default what the schedule holds, and of users who wait 8 each, 32 at least.
        max_duration_s: no request is sent after this.
        target: gateway or engine of the running stack.
        url, api_key, tokenizer, takes_extras, num_units, usd_per_hour: of an endpoint; see `bench_target.at_url`.
        slo: what counts as good, instead of the configuration's.
        client_processes: that share the load; what it takes when None.
    """

    model: str
    load: str = "closed:concurrency=4"
    workload: str | None = None
    num_prompt_tokens: int = 64
    num_output_tokens: int = 32
    num_requests: int | None = None
    max_duration_s: float = 120.0
    target: TargetKind = TargetKind.GATEWAY
    url: str | None = None
    api_key: str | None = None
    tokenizer: str | None = None
    takes_extras: bool | None = None
    num_units: int = 1
    usd_per_hour: float | None = None
    slo: Slo | None = None
    client_processes: int | None = None

    def arrival(self) -> Arrival:
        """When requests are sent. Raises SpecError."""
        return parse_arrival(self.load)

    def workload_for(self, task: Task) -> Workload:
        """What is sent. Raises SpecError."""
        usual = f"completion:prompt={self.num_prompt_tokens},output={self.num_output_tokens}"
        if task is Task.EMBED:
            usual = f"embed:prompt={self.num_prompt_tokens}"
        return parse_workload(self.workload or usual)


def planned_requests(arrival: Arrival, workload: Workload, max_duration_s: float, seed: int) -> int:
    """Requests of a run when nobody says how many: all that its schedule holds; of a closed loop some for each user."""
    turns = workload.maker.num_turns if isinstance(workload.maker, Synthetic) else 1
    if isinstance(arrival, ClosedLoop):
        return turns * max(MIN_REQUESTS, REQUESTS_A_USER * arrival.concurrency)
    times_s = arrival.send_times_s(random.Random(f"{seed}/arrivals"))
    return turns * max(1, sum(1 for _ in islice(takewhile(lambda at_s: at_s < max_duration_s, times_s), MAX_PLANNED)))
