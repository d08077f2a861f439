"""Runs something while an energy meter is on, and the joules a token that it took."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from workbench.absent import Absent
from workbench.hardware.nvml import asked, nvml
from workbench.loadgen.records import RequestRecord
from workbench.measurement.energy import Energy, EnergyMeter, joules_per_token, meter_for_cpu, meter_for_gpus

TICK_S = 20.0
CPU_CLASS = "cpu"


@asynccontextmanager
async def ticking(meter: EnergyMeter) -> AsyncIterator[None]:
    """Starts the meter and reads it often enough that no counter passes its range unseen."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            meter.tick()

    meter.start()
    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()


def meter_of(url: str, hardware_class: str | None, num_units: int) -> EnergyMeter:
    """The meter of what serves at `url`; one that says why there is none.

    Args:
        url: of the engine.
        hardware_class: `cpu` or a GPU's; None where nobody said.
        num_units: GPUs that serve there.
    """
    if not _is_here(url):
        return EnergyMeter(Absent(f"{url} is another machine, whose counters cannot be read from here"))
    num_gpus = 0 if hardware_class == CPU_CLASS else _num_gpus()
    if not num_gpus:
        return meter_for_cpu()
    if hardware_class is not None and num_gpus != num_units:
        return EnergyMeter(Absent(f"{num_gpus} GPUs are here, and which {num_units} of them serve is not known"))
    return meter_for_gpus(range(num_gpus))


def energy_metrics(
    used: Energy | Absent, records: Sequence[RequestRecord], *, counts_prompts: bool
) -> dict[str, float]:
    """All that a run took over all tokens that it was for; empty where that is not known.

    Args:
        used: by the whole run, its first wave included.
        records: of the whole run.
        counts_prompts: whether it was for prompt tokens (`joules_per_token`: embedding, prefill), else for output
            tokens (`joules_per_output_token`).
    """
    served = [record for record in records if record.ok]
    tokens = sum(record.num_prompt_tokens if counts_prompts else record.num_output_tokens for record in served)
    joules = joules_per_token(used, tokens)
    name = "joules_per_token" if counts_prompts else "joules_per_output_token"
    return {} if isinstance(joules, Absent) else {name: joules}


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _num_gpus() -> int:
    with nvml() as library:
        if isinstance(library, Absent):
            return 0
        count = asked(library, "the number of GPUs", library.nvmlDeviceGetCount)
        return 0 if isinstance(count, Absent) else int(count)
