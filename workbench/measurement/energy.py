"""Joules of a window, for joules per token: from the CPU's RAPL counters or a GPU's own, or absent with the reason.

    meter = meter_for_cpu()            # or meter_for_gpus([0])
    meter.start(); …; meter.tick(); …  # `tick` at least once a minute: RAPL counters begin again at their range
    used = meter.stop()                # Energy, or Absent(reason)

Both counters are of the whole package or device: what else runs there is counted too, so a figure means something
only on a machine that does nothing else. A virtual machine usually has neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from workbench.absent import Absent
from workbench.hardware.nvml import asked, nvml

MIN_WINDOW_S = 1.0
"""The counters move in steps of up to 0.1 s."""
MOST_WATTS = 2_000.0
"""No package and no GPU takes more for long: a counter that says so is broken."""
MOST_WATTS_OF_A_PACKAGE = 1_000.0
"""What a RAPL counter grows by at most: at 65,536 J, the smallest range seen, it can begin again after a minute."""
POWERCAP = Path("/sys/class/powercap")
_UJ_PER_J, _MJ_PER_J = 1e6, 1e3


@dataclass(frozen=True, slots=True)
class Energy:
    """What a window took, and which counter said so."""

    joules: float
    window_s: float
    source: str

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.window_s


def joules_per_token(used: Energy | Absent, num_tokens: float) -> float | Absent:
    """Joules a token, of all that the window took."""
    if isinstance(used, Absent):
        return used
    return used.joules / num_tokens if num_tokens > 0 else Absent("no tokens in the window")


class Counter(Protocol):
    """A counter of energy that only grows, until it begins again at its range."""

    @property
    def name(self) -> str:
        """What it counts, for people."""
        ...

    @property
    def range_j(self) -> float | None:
        """Where it begins again; None when it does not."""
        ...

    def read_j(self) -> float | Absent:
        """Joules since some moment in the past."""
        ...


@dataclass(slots=True)
class _Reading:
    counter: Counter
    last_j: float
    used_j: float = 0.0


@dataclass(slots=True)
class EnergyMeter:
    """Adds up counters over a window.

    Args:
        counters: all that belong to what is measured; or why there are none.
        now_s: a clock that never goes back.
    """

    counters: Sequence[Counter] | Absent
    now_s: Callable[[], float] = time.monotonic
    _readings: list[_Reading] = field(default_factory=list, init=False)
    _trouble: Absent | None = field(default=None, init=False)
    _began_s: float = field(default=0.0, init=False)
    _read_s: float = field(default=0.0, init=False)

    def start(self) -> None:
        """Begins a window; one that ran is forgotten."""
        self._readings, self._trouble = [], None
        if isinstance(self.counters, Absent):
            self._trouble = self.counters
            return
        for counter in self.counters:
            value = counter.read_j()
            if isinstance(value, Absent):
                self._trouble = value
                return
            self._readings.append(_Reading(counter, value))
        self._began_s = self._read_s = self.now_s()

    def tick(self) -> None:
        """Reads the counters, so that none can pass its range twice between two readings."""
        now_s = self.now_s()
        since_s, self._read_s = now_s - self._read_s, now_s
        for reading in self._readings if self._trouble is None else ():
            self._trouble = _add_growth(reading, since_s)
            if self._trouble is not None:
                return

    def stop(self) -> Energy | Absent:
        """What the window took, or why that cannot be said."""
        if not self._readings and self._trouble is None:
            return Absent("the meter was not started")
        self.tick()
        window_s = self._read_s - self._began_s
        if self._trouble is not None:
            return self._trouble
        if window_s < MIN_WINDOW_S:
            return Absent(f"a window of {window_s:.2f} s is shorter than the counters' steps allow ({MIN_WINDOW_S} s)")
        for reading in self._readings:
            if reading.used_j > MOST_WATTS * window_s:
                return Absent(f"{reading.counter.name} says {reading.used_j / window_s:.0f} W, which cannot be")
        joules = sum(reading.used_j for reading in self._readings)
        if joules <= 0:
            return Absent("the counters did not move")
        return Energy(joules, window_s, ", ".join(reading.counter.name for reading in self._readings))


def _add_growth(reading: _Reading, since_s: float) -> Absent | None:
    """Takes what came since the last reading; or says why that is not known."""
    name, range_j = reading.counter.name, reading.counter.range_j
    value_j = reading.counter.read_j()
    if isinstance(value_j, Absent):
        return value_j
    grown_j = value_j - reading.last_j
    if range_j is None and grown_j < 0:
        return Absent(f"{name} went back: the driver was loaded anew")
    if range_j is not None and since_s * MOST_WATTS_OF_A_PACKAGE > range_j:
        return Absent(f"{name} could have begun again unseen in {since_s:.0f} s: call tick() more often")
    reading.used_j += grown_j if range_j is None or grown_j >= 0 else grown_j + range_j
    reading.last_j = value_j
    return None


@dataclass(frozen=True, slots=True)
class RaplCounter:
    """One domain of RAPL: `energy_uj` of a folder below /sys/class/powercap."""

    folder: Path
    name: str
    range_j: float | None

    def read_j(self) -> float | Absent:
        """The counter in joules."""
        path = self.folder / "energy_uj"
        try:
            return int(path.read_text()) / _UJ_PER_J
        except PermissionError:
            return Absent(f"RAPL: {path} is readable by root alone (sudo chmod a+r {path})")
        except (OSError, ValueError) as error:
            return Absent(f"RAPL: {path} cannot be read: {error}")


def meter_for_cpu(root: Path = POWERCAP) -> EnergyMeter:
    """A meter of every CPU package and of the memory beside it."""
    counters = []
    for folder in sorted(root.glob("*rapl:*")) if root.is_dir() else []:
        try:
            name = (folder / "name").read_text().strip()
            range_j = int((folder / "max_energy_range_uj").read_text()) / _UJ_PER_J
        except (OSError, ValueError):
            continue
        # `core` and `uncore` lie inside a package, `psys` around all, and intel-rapl-mmio repeats a package.
        if (name.startswith("package") or name == "dram") and "mmio" not in folder.name:
            counters.append(RaplCounter(folder, f"RAPL {name} {folder.name.partition(':')[2]}", range_j))
    if not counters:
        return EnergyMeter(Absent(f"RAPL: no package below {root}, as in most virtual machines"))
    return EnergyMeter(tuple(counters))


@dataclass(frozen=True, slots=True)
class NvmlCounter:
    """Energy of one GPU since its driver was loaded (Volta and later)."""

    index: int
    module: Any = None
    range_j: float | None = None

    @property
    def name(self) -> str:
        """Which GPU."""
        return f"NVML GPU {self.index}"

    def read_j(self) -> float | Absent:
        """The counter in joules; absent on a device that is split, whose counter is of all parts together."""
        with nvml(self.module) as library:
            if isinstance(library, Absent):
                return library
            handle = asked(library, self.name, lambda: library.nvmlDeviceGetHandleByIndex(self.index))
            if isinstance(handle, Absent):
                return handle
            mig = asked(library, "MIG", lambda: library.nvmlDeviceGetMigMode(handle)[0])
            if not isinstance(mig, Absent) and mig:
                return Absent(f"{self.name} is split (MIG): its counter is of all parts together")
            energy_mj = asked(
                library, f"{self.name} has no energy counter",
                lambda: float(library.nvmlDeviceGetTotalEnergyConsumption(handle)),
            )  # fmt: skip
            return energy_mj if isinstance(energy_mj, Absent) else energy_mj / _MJ_PER_J


def meter_for_gpus(indexes: Sequence[int], module: Any = None) -> EnergyMeter:
    """A meter of these GPUs.

    Args:
        indexes: the driver's numbers.
        module: stands in for `pynvml`.
    """
    if not indexes:
        return EnergyMeter(Absent("no GPU"))
    return EnergyMeter(tuple(NvmlCounter(index, module) for index in indexes))
