# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What can this hardware give, what do our models get out of it, and what does a token cost on it?
#
# An answer needs all of this:
#
# - rows say where they come from and never mix: **measured** here, **published** by the maker, **predicted** by a
#   formula;
# - the probe has the machine to itself: other load lowers both of its ceilings;
# - prices of an hour are the configuration's, with source and date; a price of a token is no better than that.

# %% tags=["parameters"]
models: list[str] = ["smollm2-135m", "gemma3-270m"]  # of workbench.yaml
mode: str = "short"  # short or full, as in the sweep
concurrencies: list[int] = []  # none: the mode's own
num_prompt_tokens: int | None = None
num_output_tokens: int | None = None
probe_seconds: float = 16.0  # 0: the newest probe that is kept of this hardware
weights_gb: float = 0.269  # of the first model, in 1e9 bytes: what a token reads
max_age_s: float | None = None  # finished cells older than this are measured again; none: 15 days

# %%
import workbench
from workbench import plots
from workbench.hardware.beside import beside, ceilings, facts
from workbench.studies import cost_rows, log_study

workbench.connect()

# %% [markdown]
# ## The fingerprint
# What figures are measured on. Its digest stands on every row, and a row whose digest is not that of the pool counts as
# unmeasured.

# %%
facts()

# %% [markdown]
# ## The two ceilings
# Copy bandwidth bounds decoding, the matrix rate bounds prefill. Of one core or GPU, median of the repetitions with the
# interval of that median; it says how steady the machine was then.

# %%
probe = ceilings(probe_seconds)
for name, unit in (("bandwidth_tb_s", "TB/s"), ("tflops", f"TFLOP/s in {probe['dtype']}")):
    rate, published = probe[name], probe[f"published_{name}"]
    interval = "too few for an interval" if rate["low"] is None else f"{rate['low']:.4g} to {rate['high']:.4g}"
    print(f"{name}: measured {rate['median']:.4g} {unit} ({interval}); published {published}")

# %% [markdown]
# ## The cost table
# Cells that are already measured are taken from disk. Intervals (95 %) are of tokens a second; a price's follows from
# it.

# %%
sweeps = [
    workbench.sweep(
        model,
        mode=mode,
        concurrencies=concurrencies,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        max_age_s=max_age_s,
    )
    for model in models
]

# %%
costs = cost_rows(sweeps)
shown = ["model", "hardware_class", "target", "num_prompt_tokens", "num_output_tokens", "concurrency"]
shown += ["output_tokens_per_s_per_gpu", "ci_low", "ci_high", "ttft_p50_s", "usd_per_million_input_tokens"]
shown += ["usd_per_million_output_tokens", "provenance", "measured_at", "expires_at"]
costs[shown]

# %%
plots.cost_heatmap(costs)

# %% [markdown]
# ## Measured, published, predicted
# A prediction is an upper bound for one stream: each of its tokens reads all weights once, so it comes no faster than
# bandwidth over weights. KV cache, attention and the engine's own work are left out.

# %%
rows = beside(probe, costs[costs["target"] == "engine"], model=models[0], weights_gb=weights_gb)
rows

# %% [markdown]
# ## Conclusion

# %%
print("\n\n".join(sweep.conclusion() for sweep in sweeps))
here = rows[rows["hardware_class"] == probe["hardware_class"]]
measured = here[here["provenance"] == "measured"]["output_tokens_per_s_per_gpu"].iloc[0]
bound = here[here["provenance"] == "predicted"]["output_tokens_per_s_per_gpu"].iloc[-1]
if measured == measured:
    print(f"\n{models[0]}, one stream: {measured:.3g} tokens/s, {measured / bound:.0%} of what the bandwidth allows")

# %% [markdown]
# ## Limits
# A row counts for routing only when all of this holds; else the pool is routed by load alone and a metric says so:
#
# - it is measured, on the engine and the hardware whose fingerprints the pool has now, and has not expired;
# - its cell counts: exact lengths, no prefix cache, few failures, the engine's counters within 1 % of the client's;
# - a prefill cell of the same length stands beside it, or input has no price.
#
# Published bandwidth and rates of class `cpu` are orders of magnitude, not of this machine. A copy reads and writes;
# decoding mostly reads: the bound may be too low by up to a half. A shared machine's neighbours are in every figure.

# %%
tables = {"hardware": rows, "costs": costs}
run_id = log_study("hardware comparison and cost table", tables, metrics={"single_stream_tokens_per_s": measured})
workbench.record_run(run_id)
