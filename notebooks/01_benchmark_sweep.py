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
# # How many tokens a second does one GPU (or core) give, and what does a million tokens cost?
#
# The answer holds only if all of this is true; the sweep checks it and marks a cell invalid where it is not:
#
# - nothing but the sweep uses the replica, and the client does not run on its cores;
# - prompts have exactly the stated length in the model's own tokens, and no two share a prefix: nothing comes from
#   the prefix cache;
# - every answer has exactly the stated length; figures are of the window after the warm-up;
# - the engine's own token counters agree with what the client counted.

# %% tags=["parameters"]
model: str = "smollm2-135m"  # a model of workbench.yaml, also name@version
mode: str = "short"  # short (a minute on a CPU core) or full (the figures to publish)
concurrencies: list[int] = []  # requests in flight, a cell each; none: the mode's own
num_prompt_tokens: int | None = None  # of each request, with num_output_tokens; none: the mode's own shapes
num_output_tokens: int | None = None
replica: str | None = None  # which replica of the running stack; none: any ready one
max_age_s: float | None = None  # finished cells older than this are measured again; none: 15 days

# %%
import workbench
from workbench import plots, run_plots
from workbench.measurement.findings import find
from workbench.sweeps.pareto import Goal, pareto_front, speed_points
from workbench.sweeps.phase_curves import phase_curves

workbench.connect()

# %% [markdown]
# ## Measurement
# The replica is taken out of routing while it is measured. A closed loop: each of `concurrency` clients sends its next
# request when its last one has ended. Cells that are already measured (same model version, configuration, hardware and
# plan) are taken from disk, so a sweep that was cut off goes on where it was.

# %%
sweep = workbench.sweep(
    model,
    mode=mode,
    concurrencies=concurrencies,
    num_prompt_tokens=num_prompt_tokens,
    num_output_tokens=num_output_tokens,
    replica=replica,
    max_age_s=max_age_s,
)
sweep

# %%
sweep.overview()

# %% [markdown]
# ## Throughput against concurrency
# Bars are 95 % intervals. Where the line stops rising, more requests in flight only wait for each other.

# %%
plots.throughput(sweep.cells)

# %% [markdown]
# ## Latency against load
# What the added throughput costs each user. An open marker is a P99 that its sample is too small to carry: it is the
# largest value seen. The dotted line is the SLO of this hardware class.

# %%
plots.latency(sweep.cells, slo_ttft_p99_s=sweep.slo.ttft_p99_s, slo_tpot_p99_s=sweep.slo.tpot_p99_s)

# %% [markdown]
# ## What is worth choosing
# More users bring more tokens a second of the machine and fewer to each of them. On the front nothing measured is
# better in both; `perhaps` means that only the values say so and the intervals overlap.

# %%
placed = pareto_front(speed_points(sweep.result.cells), Goal.MORE, Goal.MORE)
run_plots.pareto(placed, x_title="Tokens/s of a GPU or core", y_title="Tokens/s of a user") if placed else "embeddings"

# %% [markdown]
# ## How latencies spread
# A share of requests had at most that time to its first token. Steps are waves: in a closed loop users whose prompts
# are prefilled together wait together.

# %%
records = sweep.records()
run_plots.shares_by_cell(records, "e2e_s" if sweep.result.cells[0].task == "embed" else "ttft_s")

# %% [markdown]
# ## The run over time
# The cell with the most in flight. Shaded is the steady part; dotted lines are changes of level that chance does not
# make.

# %%
busiest = max(records, key=lambda name: int(name.rpartition("-c")[2]))
run_plots.timeline(find(records[busiest], is_closed=True))

# %% [markdown]
# ## Prefill and decode apart
# Where seconds go: a prompt's by its length, a decode step's by how many streams share it.

# %%
curves = phase_curves(sweep.result.cells)
run_plots.phases(curves) if curves.prefill or curves.decode else "embeddings have neither phase alone"

# %% [markdown]
# ## Cost
# The price of an hour of this hardware (`workbench.yaml`, with source and date) over the tokens it gave: input by the
# prefill-only rate, output by the decode rate, scaled so that a cell's own requests pay exactly for its time. Routing
# reads the published table, not this figure: `workbench cost-table build --publish`.

# %%
costs = sweep.cost_table()
plots.cost(costs)

# %%
plots.cost_heatmap(costs, "input" if sweep.result.cells[0].task == "embed" else "output")

# %% [markdown]
# ## Conclusion

# %%
print(sweep.conclusion())

# %% [markdown]
# ## Limits
# - These shapes of request; another ratio of input to output gives another price.
# - A closed loop keeps the replica busy: a real load with gaps pays for idle time too.
# - Prompts are random words: with shared prefixes the prefix cache makes input cheaper than it is here.
# - One replica on one machine, at the clocks and with the neighbours it had. The figures count for routing only while
#   engine and hardware fingerprints are the same and until they expire.

# %%
workbench.record_run(sweep.run_id)
