"""The CPU, the memory and the limits of the container, from /proc and /sys. Each fact is a value or says why not."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from workbench.absent import Absent

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
             "asimd", "sve", "bf16", "i8mm")  # fmt: skip
ROOT = Path("/")
_KHZ_PER_MHZ = 1000.0


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor and what holds it back.

    Attributes:
        governor: of all cores; `mixed` when they differ.
        clock_cap_mhz: the highest clock that the system lets a core run at.
    """

    model: str
    isa: tuple[str, ...]
    num_cores: int
    num_numa_nodes: int | Absent
    governor: str | Absent
    clock_cap_mhz: float | Absent
    last_level_cache_bytes: int | Absent


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """What cgroup v2 lets this process use; `None` is no limit."""

    cpu_cores: float | None
    memory_bytes: int | None


def read_cpu(root: Path = ROOT) -> Cpu:
    """The CPU of this machine."""
    model, flags = _model(root / "proc/cpuinfo")
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    return Cpu(
        model=model,
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        num_cores=os.cpu_count() or 1,
        num_numa_nodes=len(nodes) if nodes else Absent("the kernel lists no NUMA nodes"),
        governor=_governor(root),
        clock_cap_mhz=_clock_cap_mhz(root),
        last_level_cache_bytes=_last_level_cache(root),
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> int:
    """Memory of the machine, rounded: what the kernel reserves differs a little between boots."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def container_limits(root: Path = ROOT) -> ContainerLimits | Absent:
    """The tightest limits from this process's cgroup up to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return Absent("the kernel tells no cgroup of this process")
    inside = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), None)
    mount = root / "sys/fs/cgroup"
    if inside is None or not (mount / "cgroup.controllers").exists():
        return Absent("no cgroup v2 is mounted at /sys/fs/cgroup; limits of v1 are not read")
    folder = mount / inside.lstrip("/")
    cpu_cores: list[float] = []
    memory_bytes: list[int] = []
    for place in (folder, *folder.parents):
        quota, period = [*_words(place / "cpu.max"), "", ""][:2]
        if quota.isdigit() and period.isdigit() and int(period):
            cpu_cores.append(int(quota) / int(period))
        memory = "".join(_words(place / "memory.max"))
        if memory.isdigit():
            memory_bytes.append(int(memory))
        if place == mount:
            break
    return ContainerLimits(min(cpu_cores, default=None), min(memory_bytes, default=None))


def _model(path: Path) -> tuple[str, frozenset[str]]:
    """Name and instruction-set flags of the first core."""
    model, flags = platform.processor() or platform.machine(), frozenset[str]()
    if not path.exists():
        return model, flags
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        if key.strip() in ("flags", "Features"):
            return model, frozenset(value.split())
    return model, flags


def _frequency_files(root: Path, name: str) -> list[Path]:
    return sorted((root / "sys/devices/system/cpu").glob(f"cpu[0-9]*/cpufreq/{name}"))


def _governor(root: Path) -> str | Absent:
    found = {" ".join(_words(path)) for path in _frequency_files(root, "scaling_governor")} - {""}
    if not found:
        return Absent("the kernel scales no clock here (no cpufreq), as in most virtual machines")
    return found.pop() if len(found) == 1 else "mixed"


def _clock_cap_mhz(root: Path) -> float | Absent:
    found = [int(word) for path in _frequency_files(root, "scaling_max_freq") for word in _words(path)]
    return max(found) / _KHZ_PER_MHZ if found else Absent("the kernel scales no clock here (no cpufreq)")


def _last_level_cache(root: Path) -> int | Absent:
    sizes = []
    for path in (root / "sys/devices/system/cpu").glob("cpu0/cache/index*/size"):
        size = "".join(_words(path))
        if size.endswith("K") and size[:-1].isdigit():
            sizes.append(int(size[:-1]) * 1024)
    return max(sizes) if sizes else Absent("the kernel lists no caches")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
