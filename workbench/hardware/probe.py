"""The probe: copy bandwidth and matrix rate of a device, beside what its class's table says, and kept on disk.

The measurement runs in a child process (ceilings.py): torch never enters this one. What is published (a data sheet)
and what is measured stay apart: they are separate fields, and the share of one in the other is named as such.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import psutil

from workbench.absent import Absent
from workbench.hardware.cpu import Cpu
from workbench.hardware.identity import HardwareFingerprint

DEFAULT_BUDGET_S = 16.0
START_S = 60.0
"""For the child to import torch and open the device."""
CONFIDENCE = 0.95
MISSING_TORCH = 4
_COPY_BYTES_CPU, _COPY_BYTES_GPU = 256 * 2**20, 2**30
_BYTES_PER_TB, _OPS_PER_TFLOP = 1e12, 1e12
_SHORT = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


class ProbeFailed(Exception):
    """The child did not measure; the message says why. `is_missing` when a package or a device is not there."""

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


class PublishedClass(Protocol):
    """What the probe compares with: `workbench.config.HardwareClass` has it. Values of one unit."""

    bandwidth_tb_s: float
    tflops: dict[str, float]
    source: str


@dataclass(frozen=True, slots=True)
class Request:
    """What the child is asked: `device` is torch's word, cpu or cuda; `dtype` torch's name."""

    device: str
    dtype: str
    copy_bytes: int
    num_threads: int
    budget_s: float


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A measured rate: the median of the repetitions with the 95 % interval of that median.

    `low` and `high` are None where there are too few repetitions for an interval. The repetitions follow each other
    on one machine, so the interval says how steady it was then, not what it gives on another day.
    """

    median: float
    low: float | None
    high: float | None
    num_repeats: int


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found.

    Attributes:
        num_units: cores or GPUs that took part; the published values count as many.
        bandwidth_tb_s: copied, bytes read and bytes written.
        tflops: of a product of square matrices of `matrix_size` in `dtype`.
        published_*: from the class's table for all units; None where it says nothing.
    """

    hardware_class: str
    fingerprint: str
    covers: Mapping[str, Any]
    device: str
    dtype: str
    num_units: int
    copy_bytes: int
    matrix_size: int
    torch: str
    measured_at: str
    bandwidth_tb_s: Ceiling
    tflops: Ceiling
    published_bandwidth_tb_s: float | None
    published_tflops: float | None
    published_source: str | None
    provenance: str = "measured"

    @property
    def bandwidth_frac(self) -> float | None:
        """Share of the published bandwidth."""
        return _share(self.bandwidth_tb_s.median, self.published_bandwidth_tb_s)

    @property
    def tflops_frac(self) -> float | None:
        """Share of the published matrix rate."""
        return _share(self.tflops.median, self.published_tflops)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the shares."""
        return asdict(self) | {"bandwidth_frac": self.bandwidth_frac, "tflops_frac": self.tflops_frac}


def request_for(
    on_gpu: bool, cpu: Cpu, num_threads: int, budget_s: float = DEFAULT_BUDGET_S, dtype: str | None = None
) -> Request:
    """What to ask: arrays well beyond the last cache, and unless said the format that the device is made fast for."""
    if on_gpu:
        return Request("cuda", dtype or "bfloat16", _COPY_BYTES_GPU, num_threads, budget_s)
    cache = 0 if isinstance(cpu.last_level_cache_bytes, Absent) else cpu.last_level_cache_bytes
    most = psutil.virtual_memory().available // 8
    copy_bytes = min(max(_COPY_BYTES_CPU, 2 * cache), most) // 4096 * 4096
    is_fast_bf16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu.isa)
    return Request("cpu", dtype or ("bfloat16" if is_fast_bf16 else "float32"), copy_bytes, num_threads, budget_s)


def probe(request: Request, identity: HardwareFingerprint, published: PublishedClass | None) -> Probe:
    """Measures for about `request.budget_s` seconds, beside the start of torch.

    Raises:
        ProbeFailed: torch or the device is not there, or the child ended without a result.
    """
    return result(run_child(request), request, identity, published)


def run_child(request: Request, module: str = "workbench.hardware.ceilings") -> dict[str, Any]:
    """What the child measured. Raises ProbeFailed."""
    command = [sys.executable, "-m", module]
    limit_s = request.budget_s + START_S
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(request)), capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailed(f"the probe did not end within {limit_s:.0f} s: is the machine busy?") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        is_missing = done.returncode == MISSING_TORCH
        raise ProbeFailed(said[0] if is_missing else f"the probe failed: {said[0]}", is_missing=is_missing)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def result(
    measured: Mapping[str, Any], request: Request, identity: HardwareFingerprint, published: PublishedClass | None
) -> Probe:
    """The child's rates as a probe beside the published values."""
    num_units = request.num_threads if request.device == "cpu" else 1
    tflops = None if published is None else published.tflops.get(_SHORT[request.dtype])
    return Probe(
        hardware_class=identity.hardware_class,
        fingerprint=identity.digest,
        covers=identity.covers(),
        device=identity.device,
        dtype=request.dtype,
        num_units=num_units,
        copy_bytes=request.copy_bytes,
        matrix_size=measured["matrix_size"],
        torch=measured["torch"],
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        bandwidth_tb_s=ceiling(measured["copy_bytes_per_s"], _BYTES_PER_TB),
        tflops=ceiling(measured["operations_per_s"], _OPS_PER_TFLOP),
        published_bandwidth_tb_s=None if published is None else published.bandwidth_tb_s * num_units,
        published_tflops=None if tflops is None else tflops * num_units,
        published_source=None if published is None else published.source,
    )


def ceiling(rates: Sequence[float], unit: float) -> Ceiling:
    """Median and its distribution-free interval, from the binomial of how many repetitions fall below the median.

    Raises:
        ProbeFailed: a rate is no positive number.
    """
    values = sorted(rate / unit for rate in rates)
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ProbeFailed(f"the probe measured no rate: {list(rates)}")
    num = len(values)
    middle = (values[(num - 1) // 2] + values[num // 2]) / 2
    rank, below = 0, 0.0
    while below + math.comb(num, rank) / 2**num <= (1 - CONFIDENCE) / 2:
        below += math.comb(num, rank) / 2**num
        rank += 1
    if rank == 0:
        return Ceiling(middle, None, None, num)
    return Ceiling(middle, values[rank - 1], values[num - rank], num)


def keep(found: Probe, folder: Path) -> Path:
    """Writes the probe beside earlier ones; its name begins with the fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = found.measured_at.replace(":", "").replace("-", "").replace("+0000", "Z")
    path = folder / f"{found.fingerprint}-{stamp}.json"
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(found.to_json(), indent=1, allow_nan=False), encoding="utf-8")
    return partial.replace(path)


def last_kept(digest: str, folder: Path) -> dict[str, Any] | None:
    """The newest probe of this very hardware as JSON; None when there is none that can be read."""
    for path in sorted(folder.glob(f"{digest}-*.json"), reverse=True):
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return found
    return None


def _share(value: float, published: float | None) -> float | None:
    return None if published is None else value / published
