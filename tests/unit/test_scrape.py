"""Reading vLLM's metrics page."""

from __future__ import annotations

import pytest

from serving.core.errors import UpstreamError
from serving.core.state import ReplicaSnapshot
from serving.engine.scrape import parse_metrics

# As vLLM 0.32 writes it, cut to the lines that matter and some of their neighbours.
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2-135m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="smollm2-135m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2-135m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2-135m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="smollm2-135m"} 1e+03
vllm:prefix_cache_queries_created{engine="0",model_name="smollm2-135m"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="smollm2-135m"} 640.0
vllm:num_preemptions_total{engine="0",model_name="smollm2-135m"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="smollm2-135m"} 5000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="x",source="local_compute"} 4.0
vllm:generation_tokens_total{engine="0",model_name="smollm2-135m"} 700.0
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="None",num_gpu_blocks="728"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="smollm2-135m"} 0.0
process_virtual_memory_bytes 1.0
"""
SNAPSHOT = ReplicaSnapshot(
    replica_id="r0",
    observed_at_s=7.0,
    num_running=3,
    num_waiting=2,
    kv_cache_usage_frac=0.25,
    kv_cache_capacity_tokens=728 * 32,
    num_prompt_tokens_total=5000,
    num_output_tokens_total=700,
    num_preemptions_total=1,
    prefix_cache_queried_tokens_total=1000,
    prefix_cache_hit_tokens_total=640,
)


def test_a_page() -> None:
    assert parse_metrics(PAGE, "r0", 7.0) == SNAPSHOT


def test_data_parallel_engines_are_one_replica() -> None:
    second = "\n".join(
        line.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75") for line in PAGE.splitlines()
    )
    snapshot = parse_metrics(PAGE + second, "r0", 7.0)
    assert (snapshot.num_running, snapshot.kv_cache_usage_frac) == (6, 0.5)
    assert snapshot.kv_cache_capacity_tokens == 2 * 728 * 32


def test_the_capacity_that_the_engine_states_wins_over_blocks() -> None:
    page = PAGE.replace('kv_cache_size_tokens="None"', 'kv_cache_size_tokens="20000"')
    assert parse_metrics(page, "r0", 7.0).kv_cache_capacity_tokens == 20000


@pytest.mark.parametrize("unknown", ['num_gpu_blocks="None"', 'num_gpu_blocks=""', 'other="1"'])
def test_an_unknown_capacity_is_none(unknown: str) -> None:
    page = PAGE.replace('num_gpu_blocks="728"', unknown)
    assert parse_metrics(page, "r0", 7.0).kv_cache_capacity_tokens is None


def test_labels_may_hold_braces_and_spaces() -> None:
    page = PAGE.replace("smollm2-135m", "a {odd} name, 1")
    assert parse_metrics(page, "r0", 7.0) == SNAPSHOT


@pytest.mark.parametrize(
    ("wrong", "right", "match"),
    [
        ("vllm:num_requests_running{", "vllm:other{", "lack vllm:num_requests_running"),
        ("} 3.0", "} NaN", "no number"),
        ("} 0.25", "} NaN", "no number"),
        ("} 3.0", "} +Inf", "no number"),
        ("} 3.0", "} three", "cannot be read"),
        ("} 3.0", "}", "cannot be read"),
    ],
)
def test_a_page_that_cannot_be_trusted_is_an_error(wrong: str, right: str, match: str) -> None:
    with pytest.raises(UpstreamError, match=match):
        parse_metrics(PAGE.replace(wrong, right), "r0", 7.0)


def test_a_page_of_something_else_is_an_error() -> None:
    with pytest.raises(UpstreamError, match="is it a vLLM server"):
        parse_metrics("<html>", "r0", 7.0)
