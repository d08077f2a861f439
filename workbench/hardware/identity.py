"""The fingerprint: a digest that is the same until the hardware changes.

It covers what changes a measurement and holds still between runs and over reboots: device, memory, driver, clock
limits, power cap, partitioning, instruction set, cores, governor, the container's CPU limit. Temperatures and
momentary clocks are left out.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from workbench.absent import Absent
from workbench.hardware.cpu import ROOT, container_limits, memory_gib, read_cpu
from workbench.hardware.gpu import Gpu, gpus_here

T = TypeVar("T")
CPU_CLASS = "cpu"
DIGEST_LENGTH = 16


@dataclass(frozen=True, slots=True)
class HardwareFingerprint:
    """Hardware of one replica. Figures that a device does not report are None.

    Attributes:
        hardware_class: as in `workbench.yaml`.
        device: name of the CPU or the GPU.
        num_units: cores (CPU) or GPUs that the replica uses.
        isa: instruction sets of the CPU that change its speed.
        memory_gib: of the machine (CPU) or of one GPU.
        num_cores: cores of the machine.
        gpu: the rest of what the driver says; None on a CPU.
        kernel: operating system and its release as major.minor: a patch does not make figures stale.
        num_numa_nodes: of the machine.
        governor: what sets the clocks of a CPU's cores.
        cpu_clock_cap_mhz: the highest clock that the system lets a core run at.
        cpu_limit_cores: the container's limit of CPU time; None is no limit.
    """

    hardware_class: str
    device: str
    num_units: int
    isa: tuple[str, ...]
    memory_gib: int
    num_cores: int
    gpu: Gpu | None
    kernel: str
    num_numa_nodes: int | None = None
    governor: str | None = None
    cpu_clock_cap_mhz: float | None = None
    cpu_limit_cores: float | None = None

    def covers(self) -> dict[str, Any]:
        """What the digest is made of, as plain JSON."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def digest(self) -> str:
        """Short and stable: equal as long as nothing that it covers changes."""
        text = json.dumps(self.covers(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def fingerprint(
    hardware_class: str | None = None,
    num_units: int = 1,
    *,
    memory_gb: Mapping[str, float] | None = None,
    root: Path = ROOT,
) -> HardwareFingerprint:
    """The fingerprint of a replica of this machine.

    Args:
        hardware_class: that of the pool; None looks the device up: the first GPU, else the CPU.
        num_units: GPUs or cores that the replica uses.
        memory_gb: classes and their memory; the packaged table when None.
        root: of /proc and /sys.

    Raises:
        UnknownHardware: no class is given and the device belongs to none.
    """
    gpus = () if hardware_class == CPU_CLASS else gpus_here()
    gpu = gpus[0] if gpus else None
    cpu, limits = read_cpu(root), container_limits(root)
    name = hardware_class or (CPU_CLASS if gpu is None else gpu.class_in(memory_gb))
    return HardwareFingerprint(
        hardware_class=name,
        device=cpu.model if gpu is None else gpu.name,
        num_units=num_units,
        isa=cpu.isa if gpu is None else (),
        memory_gib=memory_gib() if gpu is None else round(gpu.memory_gib),
        num_cores=cpu.num_cores,
        gpu=gpu,
        kernel=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        num_numa_nodes=_known(cpu.num_numa_nodes),
        governor=_known(cpu.governor),
        cpu_clock_cap_mhz=_known(cpu.clock_cap_mhz),
        cpu_limit_cores=None if isinstance(limits, Absent) else limits.cpu_cores,
    )


def _known(value: T | Absent) -> T | None:
    return None if isinstance(value, Absent) else value
