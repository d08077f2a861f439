"""All that is known of this machine, for people: each fact a value, or absent with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.engine.flags import engine_build
from workbench.absent import Absent
from workbench.hardware.cpu import Cpu, container_limits, memory_gib, read_cpu, usable_cores
from workbench.hardware.gpu import Gpu, GpuState, find_gpus


@dataclass(frozen=True, slots=True)
class Fact:
    """One line: `part` of the machine, what, and its value or why there is none."""

    part: str
    name: str
    value: object

    def to_json(self) -> dict[str, Any]:
        """`value` is None where the fact is absent, and `absent` says why."""
        if isinstance(self.value, Absent):
            return {"part": self.part, "name": self.name, "value": None, "absent": self.value.reason}
        return {"part": self.part, "name": self.name, "value": self.value}


def describe(engines: Mapping[str, Mapping[str, Any]], module: Any = None) -> list[Fact]:
    """The machine, its container and its engine.

    Args:
        engines: what the engine fingerprints of running pools cover, by pool.
        module: stands in for `pynvml`.
    """
    gpus, states, asked = find_gpus(module)
    facts = [] if gpus else [Fact("gpu", "device", Absent(asked))]
    for index, (gpu, state) in enumerate(zip(gpus, states, strict=True)):
        facts += _gpu(f"gpu {index}", gpu, state)
    return facts + _cpu(read_cpu()) + _container() + _engine(engines)


def _gpu(part: str, gpu: Gpu, state: GpuState | Absent) -> list[Fact]:
    silent = Absent("the device does not report it")

    def told(value: object) -> object:
        return silent if value is None else value

    facts = [
        Fact(part, "device", gpu.name),
        Fact(part, "memory_gib", round(gpu.memory_gib, 1)),
        Fact(part, "driver", gpu.driver),
        Fact(part, "max_sm_clock_mhz", told(gpu.max_sm_clock_mhz)),
        Fact(part, "max_memory_clock_mhz", told(gpu.max_memory_clock_mhz)),
        Fact(part, "power_cap_w", told(gpu.power_cap_w)),
        Fact(part, "mig", told(gpu.mig)),
    ]
    names = ("sm_clock_mhz", "memory_clock_mhz", "nvlinks", "energy_mj")
    return facts + [Fact(part, name, state if isinstance(state, Absent) else getattr(state, name)) for name in names]


def _cpu(cpu: Cpu) -> list[Fact]:
    cache = cpu.last_level_cache_bytes
    return [
        Fact("cpu", "device", cpu.model),
        Fact("cpu", "num_cores", cpu.num_cores),
        Fact("cpu", "num_usable_cores", usable_cores()),
        Fact("cpu", "isa", " ".join(cpu.isa) or Absent("none of those that matter")),
        Fact("cpu", "clock_cap_mhz", cpu.clock_cap_mhz),
        Fact("cpu", "governor", cpu.governor),
        Fact("cpu", "last_level_cache_mib", cache if isinstance(cache, Absent) else cache // 2**20),
        Fact("cpu", "num_numa_nodes", cpu.num_numa_nodes),
        Fact("memory", "memory_gib", memory_gib()),
    ]


def _container() -> list[Fact]:
    limits = container_limits()
    if isinstance(limits, Absent):
        return [Fact("container", "limits", limits)]
    memory = limits.memory_bytes
    return [
        Fact("container", "cpu_limit_cores", Absent("no limit") if limits.cpu_cores is None else limits.cpu_cores),
        Fact("container", "memory_limit_gib", Absent("no limit") if memory is None else round(memory / 2**30, 1)),
    ]


def _engine(engines: Mapping[str, Mapping[str, Any]]) -> list[Fact]:
    name, version = engine_build()
    facts = [Fact("engine", "installed", f"{name} {version}" if version else Absent("no vLLM in this environment"))]
    if not engines:
        facts.append(Fact("engine", "flags", Absent("no stack runs here: flags are those of its pools")))
    for pool, covers in engines.items():
        facts.append(Fact(f"engine of {pool}", "version", f"{covers.get('engine')} {covers.get('engine_version')}"))
        flags = covers.get("flags") or {}
        facts.append(Fact(f"engine of {pool}", "flags", " ".join(f"{name}={value}" for name, value in flags.items())))
    return facts
