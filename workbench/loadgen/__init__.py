"""The load generator: arrivals x workload → requests → records → summary.

    vocabulary = Vocabulary.load(weights_dir)
    prompts = synthetic_prompts(vocabulary, num_prompt_tokens=64, num_output_tokens=32, seed=1)
    result = await run_load(target, prompts, ClosedLoop(16), num_requests=64, max_duration_s=60, cache_salt="cell-1")
    summary = summarize(result.records, slo=Slo(1.0, 0.025), num_units=1, num_warm_up=16)

or, from the short forms that people write (load_specs.py):

    arrival, workload = parse_arrival("gamma:rate=4,cv=2"), parse_workload("sessions:turns=4,prompt=32-96")
    prompts = workload.prompts(vocabulary, seed=1)

Stamps are taken where bytes arrive and parsed after the run, so that no stream's parsing delays another's stamp.
"""

from __future__ import annotations

from workbench.loadgen.arrivals import (
    Arrival,
    ClosedLoop,
    Constant,
    Diurnal,
    Gamma,
    OpenLoop,
    Poisson,
    Profile,
    Replay,
)
from workbench.loadgen.chat_frame import ChatFrame, FrameNeed, ask_chat_frame
from workbench.loadgen.client import Target, TargetKind
from workbench.loadgen.client_error import ClientError
from workbench.loadgen.lengths import Empirical, Fixed, Independent, LogNormal, Uniform
from workbench.loadgen.load_specs import Workload, parse_arrival, parse_workload
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.records import FailureKind, RequestRecord, TokenSource, read_parquet, to_table, write_parquet
from workbench.loadgen.runner import LoadResult, run_load
from workbench.loadgen.specs import SpecError
from workbench.loadgen.summary import Slo, Summary, summarize
from workbench.loadgen.trace_files import events_trace, read_trace, records_trace
from workbench.loadgen.trace_prompts import TraceWorkload, trace_prompts
from workbench.loadgen.traces import Trace, TracedRequest, TraceError
from workbench.loadgen.user_rows import UserWorkload
from workbench.loadgen.vocabulary import Vocabulary, WorkloadError
from workbench.loadgen.window import Window
from workbench.loadgen.workloads import Embeddings, Form, Synthetic, embedding_prompts, synthetic_prompts

__all__ = [
    "Arrival", "ClosedLoop", "Constant", "Diurnal", "Gamma", "OpenLoop", "Poisson", "Profile", "Replay",
    "Prompt", "Vocabulary", "WorkloadError", "embedding_prompts", "synthetic_prompts",
    "ChatFrame", "Embeddings", "Form", "FrameNeed", "Synthetic", "UserWorkload", "ask_chat_frame",
    "Empirical", "Fixed", "Independent", "LogNormal", "Uniform",
    "Trace", "TraceError", "TraceWorkload", "TracedRequest", "events_trace", "read_trace", "records_trace",
    "trace_prompts",
    "SpecError", "Workload", "parse_arrival", "parse_workload",
    "FailureKind", "RequestRecord", "TokenSource", "read_parquet", "to_table", "write_parquet",
    "ClientError", "LoadResult", "Target", "TargetKind", "run_load",
    "Slo", "Summary", "Window", "summarize",
]  # fmt: skip
