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
# # What does real traffic make of this engine: its lengths, its bursts, its shared prefixes?
#
# The answer holds only if all of this is true; the result says where it is not:
#
# - requests are sent when the trace says, whatever the engine does: latency counts from the **intended** time;
# - prompts share text exactly where the trace's blocks are equal, and have its lengths, shortened alike for a small
#   model;
# - the client keeps its schedule: a run whose client fell behind is refused.

# %% tags=["parameters"]
model: str = "smollm2-135m"  # a model of the running stack
trace: str = "mooncake-conversation"  # a sample that comes along, or a file
scale: float = 0.5  # how many times as fast as it was
lengths: float = 0.015625  # how many times as long prompts, answers and blocks are; a sample's are too long for a CPU
num_requests: int = 120
max_duration_s: float = 300.0
target: str = "engine"  # or gateway

# %%
import workbench
from workbench import run_plots
from workbench.loadgen.trace_files import read_trace
from workbench.studies import trace_frame

workbench.connect()

# %% [markdown]
# ## The trace
# Lengths and gaps as they are sent. `shared` is the share of prompt tokens that an earlier request had from its start
# on, the most that a prefix cache can find.

# %%
sent = read_trace(trace).part(0, num_requests).shortened(lengths)
arrivals = trace_frame(sent, scale)
print(
    f"{len(sent.requests)} requests in {arrivals['at_s'].max():.1f} s, {sent.shared_frac:.1%} of prompt tokens shared"
)
arrivals.describe(percentiles=[0.5, 0.9, 0.99])

# %% [markdown]
# ## Replayed

# %%
part = f"{trace},limit={num_requests}"
result = workbench.bench(
    model,
    load=f"trace:{part},scale={scale}",
    workload=f"trace:{part},lengths={lengths}",
    num_requests=num_requests,
    max_duration_s=max_duration_s,
    target=target,
)
result

# %% [markdown]
# ## Latency from the intended time, and service time
# `ttft_s` and `e2e_s` count from when a request was due, `service_…` from when it was sent. Where the two part the
# client was late; where both grow together requests waited in the engine.

# %%
requests = result.frame()
latencies = ["ttft_s", "service_ttft_s", "e2e_s", "service_e2e_s", "tpot_s", "send_lag_s"]
requests.loc[requests["ok"], latencies].describe(percentiles=[0.5, 0.9, 0.99])

# %%
run_plots.latency_shares(result.records, result.slo)

# %% [markdown]
# ## What the engine made of it
# Bursts show as requests in flight that rise faster than tokens a second.

# %%
result.figure("timeline")

# %% [markdown]
# ## Conclusion

# %%
metrics = result.metrics
found = metrics.get("cached_prompt_frac")
cached = "what it cached is not told" if found is None else f"{found:.1%} of the prompt tokens came from its cache"
print(f"- {len(sent.requests)} requests; {result.summary.num_failed} failed; {sent.shared_frac:.1%} shared, {cached}")
if result.invalid is not None:
    print(f"- the figures do not count: {result.invalid}")
for name in ("request_rps", "slo_good_frac", "ttft_s/p50", "service_ttft_s/p99", "send_lag_s/p99", "queue_growth_rps"):
    if name in metrics:
        print(f"- {name}: {metrics[name]:.4g}")
print("\n".join(f"- {note}" for note in result.notes))

# %% [markdown]
# ## Limits
# - Texts are random words: what depends on meaning, such as when an answer ends by itself, is the trace's length
#   instead.
# - Shortened lengths keep proportions, not the work: attention grows with the square of a prompt.
# - A cache finds whole blocks. A shared start that is shortened to less than one (32 tokens in the default stack) is
#   found by none, so that the cached share can be 0 where the trace shares some.
# - A stretch of a trace is one draw of its traffic. A P99 of fewer than 368 requests is the largest seen.

# %%
workbench.record_run(result.log())
