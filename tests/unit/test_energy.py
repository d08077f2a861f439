from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.state import Task
from tests.nvml import FakeGpu, FakeNvml
from workbench.absent import Absent
from workbench.loadgen import FailureKind, RequestRecord
from workbench.measurement.energy import Energy, EnergyMeter, joules_per_token, meter_for_cpu, meter_for_gpus
from workbench.measurement.metered import energy_metrics

RANGE_UJ = 262_143_328_850


def domain(root: Path, folder: str, name: str, energy_uj: int, range_uj: int = RANGE_UJ) -> Path:
    (root / folder).mkdir(parents=True)
    (root / folder / "name").write_text(f"{name}\n")
    (root / folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (root / folder / "energy_uj").write_text(f"{energy_uj}\n")
    return root / folder / "energy_uj"


def clocked(meter: EnergyMeter, *at_s: float) -> EnergyMeter:
    times: Iterator[float] = iter(at_s)
    meter.now_s = lambda: next(times)
    return meter


def reason(found: object) -> str:
    assert isinstance(found, Absent), found
    return found.reason


def test_packages_and_their_memory_are_added_and_nothing_twice(tmp_path: Path) -> None:
    package = domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    memory = domain(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    for folder, name in (("intel-rapl:0:0", "core"), ("intel-rapl:1", "psys"), ("intel-rapl-mmio:0", "package-0")):
        domain(tmp_path, folder, name, 7)
    meter = clocked(meter_for_cpu(tmp_path), 100.0, 110.0)
    meter.start()
    package.write_text("605000000")
    memory.write_text("41000000")
    used = meter.stop()
    assert used == Energy(640.0, 10.0, "RAPL package-0 0, RAPL dram 0:1")
    assert isinstance(used, Energy) and used.watts == 64.0
    assert joules_per_token(used, 320) == 2.0
    assert reason(joules_per_token(used, 0)) == "no tokens in the window"


def test_a_counter_that_begins_again_is_followed_when_it_is_read_in_time(tmp_path: Path) -> None:
    counter = domain(tmp_path, "intel-rapl:0", "package-0", 65_000_000_000, range_uj=65_536_000_000)
    meter = clocked(meter_for_cpu(tmp_path), 0.0, 30.0, 60.0)
    meter.start()
    counter.write_text("464000000")  # 536 J to the range, 464 J after it
    meter.tick()
    counter.write_text("964000000")
    used = meter.stop()
    assert isinstance(used, Energy) and used.joules == pytest.approx(1500.0)


def test_a_counter_that_was_not_read_in_time_is_refused(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 1, range_uj=65_536_000_000)
    meter = clocked(meter_for_cpu(tmp_path), 0.0, 120.0)
    meter.start()
    assert "tick() more often" in reason(meter.stop())


def test_no_package_and_an_unreadable_one_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = meter_for_cpu(tmp_path / "nothing")
    meter.start()
    assert "no package below" in reason(meter.stop())
    domain(tmp_path, "intel-rapl:0", "package-0", 1)

    def refuse(self: Path, *_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    meter = meter_for_cpu(tmp_path)
    monkeypatch.setattr(Path, "read_text", refuse)
    meter.start()
    assert "readable by root alone (sudo chmod a+r" in reason(meter.stop())


@pytest.mark.parametrize(
    ("energy_mj", "until_s", "says"),
    [
        ([1_000_000, 900_000], 10.0, "went back"),
        ([1_000_000, 1_000_500], 0.5, "shorter than"),
        ([1_000_000, 1_000_000], 10.0, "did not move"),
        ([1_000_000, 99_000_000], 10.0, "9800 W, which cannot be"),
        ([], 10.0, "no energy counter"),
    ],
)
def test_a_gpu_counter_that_cannot_be_believed_is_refused(energy_mj: list[int], until_s: float, says: str) -> None:
    meter = clocked(meter_for_gpus([0], FakeNvml([FakeGpu(energy_mj=energy_mj)])), 0.0, until_s)
    meter.start()
    assert says in reason(meter.stop())


def test_gpus_are_added_and_split_ones_refused() -> None:
    gpus = [FakeGpu(energy_mj=[0, 4_000_000]), FakeGpu(energy_mj=[500, 3_000_500])]
    module = FakeNvml(gpus)
    meter = clocked(meter_for_gpus([0, 1], module), 0.0, 10.0)
    meter.start()
    assert meter.stop() == Energy(7000.0, 10.0, "NVML GPU 0, NVML GPU 1")
    assert module.num_open == 0
    for module, index, says in (
        (FakeNvml([FakeGpu(mig=1)]), 0, "split (MIG)"),
        (FakeNvml([]), 3, "Invalid Argument"),
        (FakeNvml([], fails="init"), 0, "Driver Not Loaded"),
    ):
        split = meter_for_gpus([index], module)
        split.start()
        assert says in reason(split.stop())


def test_a_meter_begins_anew_and_needs_to_be_started() -> None:
    meter = clocked(meter_for_gpus([0], FakeNvml([FakeGpu(energy_mj=[0, 1000, 5000, 9000])])), 0.0, 1.0, 5.0)
    meter.start()
    meter.start()
    assert meter.stop() == Energy(4.0, 4.0, "NVML GPU 0")
    assert reason(meter_for_gpus([0], FakeNvml([FakeGpu()])).stop()) == "the meter was not started"
    empty = meter_for_gpus([])
    empty.start()
    assert reason(empty.stop()) == "no GPU"
    assert reason(joules_per_token(empty.stop(), 5)) == "no GPU"


def test_joules_a_token_are_of_what_the_run_was_for() -> None:
    base = RequestRecord(
        "r", 0, Task.GENERATE, 8, 4, 0.0, 0.0, chunk_at_s=(0.1,), chunk_tokens=(4,), num_output_tokens=4
    )
    records = [base, replace(base, failure=FailureKind.LOST)]
    used = Energy(64.0, 10.0, "a counter")
    assert energy_metrics(used, records, counts_prompts=False) == {"joules_per_output_token": 16.0}
    assert energy_metrics(used, records, counts_prompts=True) == {"joules_per_token": 8.0}
    assert energy_metrics(Absent("none here"), records, counts_prompts=False) == {}
