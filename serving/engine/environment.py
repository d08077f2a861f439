"""The environment that an engine process starts in: offline, no telemetry, threads, preloaded libraries.

On a CPU a replica computes with one thread on the core it is bound to: two-thread replicas collapse as soon
as anything else runs. tcmalloc and Intel's OpenMP, preloaded, are worth about a quarter of the speed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.engine.flags import EngineFlags, HardwareKind

_TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_LIBRARY_FOLDERS = (
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
    Path("/usr/lib64"),
    Path("/usr/lib"),
    Path("/usr/local/lib"),
)
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_CPU = {
    # One process less and 1 GiB less a replica. Off vLLM's supported path on CPU; the live tests hold it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Binding is ours (ReplicaSpec.cores); vLLM's "auto" puts every replica on core 0.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """Variables over the parent's own, what of them decides speed, and notes for whoever started it.

    Attributes:
        variables: to set.
        unset: names to remove from the parent's.
        runtime: short facts for the engine fingerprint; no paths, so that they compare between machines.
        notes: what is missing, and what it costs.
    """

    variables: Mapping[str, str]
    unset: tuple[str, ...]
    runtime: Mapping[str, str]
    notes: tuple[str, ...]

    def over(self, parent: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the child."""
        return {name: value for name, value in parent.items() if name not in self.unset} | dict(self.variables)


def engine_environment(hardware: HardwareKind, flags: EngineFlags, *, is_offline: bool) -> EngineEnvironment:
    """What an engine process needs.

    Args:
        hardware: the vLLM build.
        flags: of this engine.
        is_offline: False lets vLLM's own loader reach the hub, for `hf:` weights.
    """
    variables = dict(_QUIET) | (_OFFLINE if is_offline else {})
    # An engine imports 10,000 modules: with no byte code kept, each start compiles them anew, 12 s a process.
    unset = ("PYTHONDONTWRITEBYTECODE",)
    if hardware is HardwareKind.GPU:
        return EngineEnvironment(variables, unset, {}, ())
    variables |= _CPU
    if flags.enforce_eager:
        # vLLM compiles two small sampling kernels on first use even in eager mode: the first request with
        # logprobs then waits 3 to 17 s for a C++ compiler.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    tcmalloc = _first_file(folder / name for folder in _LIBRARY_FOLDERS for name in _TCMALLOC)
    openmp = _first_file([Path(sys.prefix) / "lib" / "libiomp5.so"])
    found = {name: path for name, path in (("tcmalloc", tcmalloc), ("libiomp5", openmp)) if path is not None}
    inherited = [entry for entry in os.environ.get("LD_PRELOAD", "").split(":") if entry]
    if found or inherited:
        variables["LD_PRELOAD"] = ":".join(dict.fromkeys([*map(str, found.values()), *inherited]))
    notes = []
    if tcmalloc is None:
        notes.append(
            "tcmalloc is missing: engines run up to 25 % slower (Debian: apt-get install libtcmalloc-minimal4)"
        )
    if openmp is None:
        notes.append("libiomp5.so is missing from this environment: engines run slower (pip install intel-openmp)")
    return EngineEnvironment(variables, unset, {"preload": "+".join(sorted(found)), "threads": "1"}, tuple(notes))


def _first_file(candidates: Iterable[Path]) -> Path | None:
    return next((path for path in candidates if path.is_file()), None)
