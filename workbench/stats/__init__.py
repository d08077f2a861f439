"""Statistics of noisy measurements: an interval for every figure, and a reason where the sample carries none.

    percentiles     quantiles with intervals, of values and of streams
    intervals       means, shares, ratios; block bootstrap of a series that remembers
    warmup          the steady part of a timeline
    saturation      whether the queue only grows
    change_points   where a timeline changes its level
    plan            order of an A/B's runs, and the smallest effect that it will find
    compare         better | worse | no difference seen

Chance comes from generators with a name (`named_rng`), so that a figure can be computed again to the bit.
Nothing here returns NaN or infinity: input that would lead there raises ValueError. Where a sample is too small a
function returns None or a `Refusal`.
"""

from __future__ import annotations

from workbench.stats.autocorrelation import block_length, lag1_correlation
from workbench.stats.change_points import ChangePoint, change_points
from workbench.stats.compare import Compared, Comparison, Pairs, Step, Verdict, compare, holm
from workbench.stats.intervals import (
    Ratio,
    ShareMethod,
    block_bootstrap_interval,
    bootstrap_interval,
    mean_interval,
    mean_ratio,
    ratio_of_sums,
    share_interval,
    smallest_detectable_effect,
)
from workbench.stats.percentiles import (
    Percentile,
    clustered_percentile,
    clustered_quantile_interval,
    min_sample,
    percentile,
    quantile,
    quantile_interval,
)
from workbench.stats.plan import Plan, Planned, Side, detectable_effect, pair_orders, plan
from workbench.stats.samples import CONFIDENCE, POWER, Interval, Reason, Refusal, named_rng
from workbench.stats.saturation import Saturation, saturation
from workbench.stats.signed_rank import Shift, min_pairs, shift
from workbench.stats.warmup import Steady, mser, ramps, steady

__all__ = [
    "CONFIDENCE",
    "POWER",
    "ChangePoint",
    "Compared",
    "Comparison",
    "Interval",
    "Pairs",
    "Percentile",
    "Plan",
    "Planned",
    "Ratio",
    "Reason",
    "Refusal",
    "Saturation",
    "ShareMethod",
    "Shift",
    "Side",
    "Steady",
    "Step",
    "Verdict",
    "block_bootstrap_interval",
    "block_length",
    "bootstrap_interval",
    "change_points",
    "clustered_percentile",
    "clustered_quantile_interval",
    "compare",
    "detectable_effect",
    "holm",
    "lag1_correlation",
    "mean_interval",
    "mean_ratio",
    "min_pairs",
    "min_sample",
    "mser",
    "named_rng",
    "pair_orders",
    "percentile",
    "plan",
    "quantile",
    "quantile_interval",
    "ramps",
    "ratio_of_sums",
    "saturation",
    "share_interval",
    "shift",
    "smallest_detectable_effect",
    "steady",
]
