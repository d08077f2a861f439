"""Usage events for tests."""

from __future__ import annotations

from dataclasses import replace

from serving.core.state import Tier
from serving.metering.events import UsageEvent

ENDED_AT_S = 1_700_000_000.5


def an_event(**changes: object) -> UsageEvent:
    event = UsageEvent(
        id="0123456789abcdef01234567",
        tenant="acme",
        request_id="r-1",
        key_id="k1",
        model="m",
        version="1",
        adapter=None,
        pool="m-cpu",
        replica="m-cpu-0",
        tier=Tier.DEFAULT,
        num_prompt_tokens=100,
        num_cached_tokens=64,
        num_output_tokens=32,
        finish_reason="stop",
        usd=0.25,
        cost_table_run_id="run",
        status=200,
        started_at_s=ENDED_AT_S - 0.5,
        ended_at_s=ENDED_AT_S,
    )
    return replace(event, **changes)  # type: ignore[arg-type]
