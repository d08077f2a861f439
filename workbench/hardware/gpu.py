"""NVIDIA GPUs as their driver describes them: through NVML where it can be asked, else through nvidia-smi.

`Gpu` is what the fingerprint covers; both ways give the same. `GpuState` is what people want to know beside it.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.absent import Absent
from workbench.hardware.classes import class_of, packaged_sizes
from workbench.hardware.nvml import asked, nvml, text

NVIDIA_SMI_TIMEOUT_S = 10.0
_BYTES_PER_MIB = 2**20
_MIB_PER_GIB = 1024
# Order is that of `parse_gpus`.
_QUERY = (
    "name", "memory.total", "driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit", "mig.mode.current",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver describes it. Figures that a device does not report are None."""

    name: str
    memory_mib: int
    driver: str
    max_sm_clock_mhz: float | None
    max_memory_clock_mhz: float | None
    power_cap_w: float | None
    mig: str | None

    @property
    def memory_gib(self) -> float:
        """Memory in GiB."""
        return self.memory_mib / _MIB_PER_GIB

    def class_in(self, memory_gb: Mapping[str, float] | None = None) -> str:
        """The hardware class that the device belongs to, in a table of classes or the packaged one.

        Raises:
            UnknownHardware: none fits.
        """
        return class_of(self.name, self.memory_gib, packaged_sizes() if memory_gb is None else memory_gb)


@dataclass(frozen=True, slots=True)
class GpuState:
    """What NVML says of a GPU that no fingerprint covers: momentary, or told by NVML alone.

    `nvlinks` counts links that are up.
    """

    sm_clock_mhz: float | Absent
    memory_clock_mhz: float | Absent
    nvlinks: int | Absent
    energy_mj: int | Absent


def gpus_here(module: Any = None) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs of this machine; none where there is no driver."""
    return find_gpus(module)[0]


def find_gpus(module: Any = None) -> tuple[tuple[Gpu, ...], tuple[GpuState | Absent, ...], str]:
    """The GPUs, what NVML says beside, and one sentence on who was asked.

    Args:
        module: stands in for `pynvml`.
    """
    with nvml(module) as library:
        if not isinstance(library, Absent):
            found = asked(library, "NVML fails", lambda: _all_of_nvml(library))
            if not isinstance(found, Absent):
                return *found, "asked NVML" if found[0] else "NVML knows no device"
            library = found
    return _of_nvidia_smi(library)


def _all_of_nvml(library: Any) -> tuple[tuple[Gpu, ...], tuple[GpuState, ...]]:
    handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
    driver = text(library.nvmlSystemGetDriverVersion())
    return tuple(_of_nvml(library, handle, driver) for handle in handles), tuple(
        _state(library, handle) for handle in handles
    )


def _of_nvidia_smi(why_not_nvml: Absent) -> tuple[tuple[Gpu, ...], tuple[GpuState | Absent, ...], str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except FileNotFoundError:
        return (), (), "there is no nvidia-smi, so no NVIDIA driver"
    except (OSError, subprocess.SubprocessError) as error:
        return (), (), f"nvidia-smi failed: {error}"
    gpus = parse_gpus(done.stdout)
    return gpus, (why_not_nvml,) * len(gpus), "asked nvidia-smi" if gpus else "nvidia-smi knows no device"


def parse_gpus(output: str) -> tuple[Gpu, ...]:
    """Reads the CSV of nvidia-smi; a field that the device does not support is None."""
    gpus = []
    for row in csv.reader(output.splitlines(), skipinitialspace=True):
        if len(row) != len(_QUERY):
            continue
        name, memory, driver, sm_clock, memory_clock, power, mig = (cell.strip() for cell in row)
        gpus.append(
            Gpu(
                name=name,
                memory_mib=int(_number(memory) or 0),
                driver=driver,
                max_sm_clock_mhz=_number(sm_clock),
                max_memory_clock_mhz=_number(memory_clock),
                power_cap_w=_number(power),
                mig=mig if mig in ("Enabled", "Disabled") else None,
            )
        )
    return tuple(gpus)


def _of_nvml(library: Any, handle: Any, driver: str) -> Gpu:
    def clock(kind: int) -> float | None:
        found = asked(library, "clock", lambda: float(library.nvmlDeviceGetMaxClockInfo(handle, kind)))
        return None if isinstance(found, Absent) else found

    cap = asked(library, "power cap", lambda: library.nvmlDeviceGetPowerManagementLimit(handle) / 1000.0)
    mig = asked(library, "MIG", lambda: library.nvmlDeviceGetMigMode(handle)[0])
    return Gpu(
        name=text(library.nvmlDeviceGetName(handle)),
        memory_mib=int(library.nvmlDeviceGetMemoryInfo(handle).total // _BYTES_PER_MIB),
        driver=driver,
        max_sm_clock_mhz=clock(library.NVML_CLOCK_SM),
        max_memory_clock_mhz=clock(library.NVML_CLOCK_MEM),
        power_cap_w=None if isinstance(cap, Absent) else cap,
        mig=None if isinstance(mig, Absent) else ("Enabled" if mig else "Disabled"),
    )


def _state(library: Any, handle: Any) -> GpuState:
    def clock(kind: int) -> float | Absent:
        return asked(library, "clock", lambda: float(library.nvmlDeviceGetClockInfo(handle, kind)))

    return GpuState(
        sm_clock_mhz=clock(library.NVML_CLOCK_SM),
        memory_clock_mhz=clock(library.NVML_CLOCK_MEM),
        nvlinks=_links(library, handle),
        energy_mj=asked(library, "energy counter", lambda: int(library.nvmlDeviceGetTotalEnergyConsumption(handle))),
    )


def _links(library: Any, handle: Any) -> int | Absent:
    """Links that are up. A device refuses every link number that it does not have."""
    num_up = 0
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        state = asked(library, "NVLink", partial(library.nvmlDeviceGetNvLinkState, handle, link))
        if isinstance(state, Absent):
            return state if link == 0 else num_up
        num_up += int(state)
    return num_up


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
