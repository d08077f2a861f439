"""Fleets that are computed, not run: the policies of `serving/core` unchanged, on a simulated clock.

    fleet.py          what the fleet is: classes, models, pools, tiers, traces (data/fleet.yaml)
    step_time.py      how long an engine's step takes: a roofline
    prefix_cache.py   which blocks of prompts a replica still holds
    replica_model.py  one replica: continuous batching, chunked prefill, KV cache, preemption
    kernel.py         events in order of time

Every figure from here has provenance `predicted`.
"""
