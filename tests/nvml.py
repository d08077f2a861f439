"""A stand-in for `pynvml`: GPUs of a test's own making, and calls that fail as the driver's do."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class FakeGpu:
    name: str | bytes = "NVIDIA H200"
    memory_mib: int = 143771
    power_cap_mw: int | None = 700_000
    mig: int | None = 0
    links: tuple[int, ...] = (1, 1, 0)
    energy_mj: list[int] = field(default_factory=lambda: [1_000_000])


def known(value: Any) -> Any:
    if value is None:
        raise NVMLError("Not Supported")
    return value


@dataclass
class FakeNvml:
    gpus: list[FakeGpu]
    fails: str | None = None
    num_open: int = 0

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_NVLINK_MAX_LINKS = 18
    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        if self.fails == "init":
            raise NVMLError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        if self.fails == "count":
            raise NVMLError("Unknown Error")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str | bytes:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=gpu.memory_mib * 2**20)

    def nvmlDeviceGetMaxClockInfo(self, _: FakeGpu, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetClockInfo(self, _: FakeGpu, kind: int) -> int:
        return {1: 345, 2: 3201}[kind]

    def nvmlDeviceGetPowerManagementLimit(self, gpu: FakeGpu) -> int:
        return known(gpu.power_cap_mw)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [known(gpu.mig), 0]

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        return known(gpu.links[link] if link < len(gpu.links) else None)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        """The next reading; the last one repeats."""
        return known(gpu.energy_mj.pop(0) if len(gpu.energy_mj) > 1 else (gpu.energy_mj or [None])[0])
