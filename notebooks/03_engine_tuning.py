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
# # Which settings of the engine matter here: batching, chunked prefill, tokens a step?
#
# The answer holds only if all of this is true:
#
# - engines differ in one setting and get the same load; each is started for it, warmed up, and ended;
# - they have the cores that the pool would have, and nobody else is on them: `workbench pool stop` before;
# - a difference is larger than what the machine drifts between two starts, for settings take one turn each here.

# %% tags=["parameters"]
model: str = "smollm2-135m"  # a model of workbench.yaml; its first pool is varied, and must not run
concurrency: int = 8  # users in flight
num_prompt_tokens: int = 64
num_output_tokens: int = 32
num_requests: int = 48  # of the batching runs, and of the tuning's first rung
num_long_tokens: int = 1500  # prompts beside the victim; 0 leaves this part out (a fake engine does not chunk)
num_chunk_tokens: int = 128
num_victims: int = 4  # streams of 128 tokens, one after the other
vary: str = "max_num_batched_tokens"  # a field that can be tuned, and its values
values: list[int] = [128, 512, 1024]

# %%
import workbench
from workbench.studies import log_study
from workbench.sweeps.cells import Shape
from workbench.tuning import contrast

workbench.connect()

# %% [markdown]
# ## One request at a time against continuous batching
# The same users at an engine that runs one request and lets the others wait, and at one that takes each into its next
# step. Weights are read once a step, whoever shares it.

# %%
batching = contrast.batching(
    model, concurrency=concurrency, shape=Shape(num_prompt_tokens, num_output_tokens), num_requests=num_requests
)
batching

# %% [markdown]
# ## A victim under long prompts
# A stream decodes; every few seconds a long prompt comes. Off, a step takes the whole prompt and the stream stands
# still; on, each step takes a chunk of it. The price of chunking is the long prompt's own wait.

# %%
victims = None
if num_long_tokens:
    victims = contrast.long_prefill(
        model, num_long_tokens=num_long_tokens, num_chunk_tokens=num_chunk_tokens, num_victims=num_victims
    )
victims

# %% [markdown]
# ## Successive halving
# Every value in a short run, the better third in one three times as long, with all whose interval leaves it beside
# them; the value in use stays to the end. Judged by goodput: requests a second that kept the SLO.

# %%
tuned = workbench.tune(
    model,
    {vary: values},
    num_prompt_tokens=num_prompt_tokens,
    num_output_tokens=num_output_tokens,
    concurrency=concurrency,
    num_requests=num_requests,
    max_rungs=2,
)
tuned.frame()

# %% [markdown]
# ## Conclusion

# %%
rates = batching["output_tokens_per_s_per_gpu"].tolist()
if batching["invalid"].isna().all() and all(rates):
    print(f"- continuous batching: {rates[1] / rates[0]:.2g} times the tokens/s of one request at a time")
if victims is not None:
    gaps, waits = victims["itl_s/max"].tolist(), victims["long_ttft_s/median"].tolist()
    print(f"- longest gap of the victim: {gaps[0]:.3g} s without, {gaps[1]:.3g} s with chunks of {num_chunk_tokens}")
    print(f"- a long prompt's first token: {waits[0]:.3g} s without, {waits[1]:.3g} s with")
print(f"- {tuned.tuned.reason}")

# %% [markdown]
# ## Limits
# - One start a setting: what a start draws (pages, neighbours, clocks) is in the difference. Turns of `workbench.bench`
#   and `workbench.compare` tell small differences.
# - This model, these lengths, this concurrency; on a GPU the steps cost otherwise, and so do the chunks.
# - The client has the other core. What shares it with other work shows in the figures of both settings.

# %%
tables = {"batching": batching, "trials": tuned.frame()}
if victims is not None:
    tables["victims"] = victims
workbench.record_run(log_study(f"engine tuning of {model}", tables))
