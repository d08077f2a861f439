"""Fleets that are computed, not run: the policies of `serving/core` unchanged, on a simulated clock.

    fleet.py          what the fleet is: classes, models, pools, tiers, traces (data/fleet.yaml)
    workload.py       what it is asked: traces, with a model and a tier drawn for each request
    step_time.py      how long an engine's step takes: a roofline
    prefix_cache.py   which blocks of prompts a replica still holds
    replica_model.py  one replica: continuous batching, chunked prefill, KV cache, preemption
    kernel.py         events in order of time
    cost_rows.py      the fleet's cost table: each pool put through the cells of a sweep
    serving_fleet.py  all replicas behind a router
    core_router.py    the router that serves live, before them
    oracle.py         the split that knows everything: what the fleet could carry

Every figure from here has provenance `predicted`.
"""
