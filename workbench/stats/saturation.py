"""Whether more was asked than was served: a queue that grows as long as the load lasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.stats.intervals import mean_interval
from workbench.stats.samples import CONFIDENCE, Reason, Refusal, checked

NUM_BLOCKS = 8
MIN_PER_BLOCK = 3
LEAST_GROWTH_FRAC = 0.03


@dataclass(frozen=True, slots=True)
class Saturation:
    """How fast requests pile up, with the interval; `growth_frac` is of the offered rate."""

    is_saturated: bool
    growth_rps: float
    low_rps: float
    high_rps: float
    growth_frac: float


def saturation(
    in_system: Sequence[float], slot_s: float, offered_rps: float, *, confidence: float = CONFIDENCE
) -> Saturation | Refusal:
    """Judges an open loop by its requests in the system (sent and not ended), one value a slot of time.

    The growth from block to block is a mean of differences, which holds for a queue that wanders near its
    capacity as well: its differences are the arrivals less the departures of a block, and hardly correlate.
    Saturated: the growth is above 0 by its interval, and at least 3 % of what is offered. A queue that is long
    and steady is not.

    Raises:
        ValueError: a slot or an offered rate that is not above 0, or a value that is not finite.
    """
    values = checked(in_system)
    if slot_s <= 0.0 or offered_rps <= 0.0:
        raise ValueError(f"slot_s {slot_s} and offered_rps {offered_rps} must be above 0")
    if len(values) < NUM_BLOCKS * MIN_PER_BLOCK:
        text = f"{len(values)} slots are too few to see a queue grow: it takes {NUM_BLOCKS * MIN_PER_BLOCK}"
        return Refusal(Reason.TOO_FEW_VALUES, text, len(values), NUM_BLOCKS * MIN_PER_BLOCK)
    blocks = np.array([block.mean() for block in np.array_split(values, NUM_BLOCKS)])
    block_s = slot_s * len(values) / NUM_BLOCKS
    growths = np.diff(blocks) / block_s
    low, high = mean_interval(growths.tolist(), confidence=confidence) or (-math.inf, math.inf)
    growth = float(growths.mean())
    is_saturated = low > 0.0 and growth >= LEAST_GROWTH_FRAC * offered_rps
    return Saturation(is_saturated, growth, low, high, growth / offered_rps)
