"""The fake engine's Prometheus page, under vLLM's names."""

from __future__ import annotations

from serving.engine.fake.scheduler import Scheduler
from serving.engine.fake.settings import FakeSettings


def metrics_page(scheduler: Scheduler, settings: FakeSettings) -> str:
    """Gauges and counters in text format; vLLM's histograms are not modelled."""
    labels = f'engine="0",model_name="{settings.model}"'
    finished = scheduler.num_finished_total
    samples = {
        "num_requests_running": scheduler.num_running,
        "num_requests_waiting": scheduler.num_waiting,
        "kv_cache_usage_perc": scheduler.kv_cache_usage_frac,
        "prompt_tokens_total": scheduler.num_prompt_tokens_total,
        "generation_tokens_total": scheduler.num_output_tokens_total,
        "num_preemptions_total": 0,
        "prefix_cache_queries_total": scheduler.prefix_cache_queried_tokens_total,
        "prefix_cache_hits_total": scheduler.prefix_cache_hit_tokens_total,
    }
    lines = []
    for name, value in samples.items():
        lines.append(f"# TYPE vllm:{name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines.append(f"vllm:{name}{{{labels}}} {float(value)}")
    by_reason = {name: finished[name] for name in ("stop", "length", "error")}
    by_reason["abort"] = finished["abort"] + finished["died"]
    for reason, count in by_reason.items():
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}')
    rejected = f'model_name="{settings.model}",reason="max_num_queued_reqs"'
    lines.append(f"vllm:admission_rejections_total{{{rejected}}} {float(scheduler.num_rejected_total)}")
    cache = f'block_size="{settings.block_size}",engine="0",num_gpu_blocks="{settings.num_gpu_blocks}"'
    cache += f',enable_prefix_caching="{settings.enable_prefix_caching}"'
    cache += f',kv_cache_size_tokens="{settings.kv_cache_capacity_tokens}"'
    lines.append(f"vllm:cache_config_info{{{cache}}} 1.0")
    return "\n".join(lines) + "\n"
