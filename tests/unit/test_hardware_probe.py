from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from workbench.absent import Absent
from workbench.cli.app import run_app
from workbench.config import load_config
from workbench.hardware import HardwareFingerprint
from workbench.hardware.cpu import Cpu
from workbench.hardware.probe import (
    Ceiling,
    ProbeFailed,
    Request,
    ceiling,
    keep,
    last_kept,
    request_for,
    result,
    run_child,
)

MEASURED = {
    "torch": "2.13.0", "matrix_size": 1024,
    "copy_bytes_per_s": [9e9, 10e9, 11e9, 10e9, 10e9, 10e9, 10e9, 10e9],
    "operations_per_s": [0.2e12, 0.3e12, 0.25e12],
}  # fmt: skip
REQUEST = Request("cpu", "bfloat16", 2**28, 2, 4.0)
IDENTITY = HardwareFingerprint("cpu", "Some CPU", 1, ("avx2",), 24, 2, None, "Linux 6.18")


class Published:
    bandwidth_tb_s = 0.02
    tflops = {"bf16": 1.0}  # noqa: RUF012
    source = "a data sheet"


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """A module that stands in for the measuring child."""
    (tmp_path / "stand_in.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stand_in"


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([3.0, 1.0, 2.0], Ceiling(2.0, None, None, 3)),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], Ceiling(3.5, 1.0, 6.0, 6)),  # 1 - 2/64 = 97 %
        ([float(n) for n in range(1, 16)], Ceiling(8.0, 4.0, 12.0, 15)),
    ],
)
def test_a_median_has_an_interval_once_there_are_enough_repeats(rates: list[float], expected: Ceiling) -> None:
    assert ceiling(rates, 1.0) == expected


@pytest.mark.parametrize("rates", [[], [0.0], [float("nan")], [float("inf")]])
def test_no_rate_is_refused(rates: list[float]) -> None:
    with pytest.raises(ProbeFailed, match="measured no rate"):
        ceiling(rates, 1.0)


def test_the_measured_stands_beside_the_published_of_as_many_units() -> None:
    found = result(MEASURED, REQUEST, IDENTITY, Published())
    assert (found.bandwidth_tb_s.median, found.published_bandwidth_tb_s) == (0.01, 0.04)
    assert (found.bandwidth_frac, found.tflops_frac) == (0.25, 0.125)
    assert found.to_json()["provenance"] == "measured"
    alone = result(MEASURED, REQUEST, IDENTITY, None)
    assert (alone.bandwidth_frac, alone.published_tflops) == (None, None)
    other = result(MEASURED, Request("cpu", "float32", 2**28, 2, 4.0), IDENTITY, Published())
    assert other.tflops_frac is None, "the table says nothing of this format"


def test_the_newest_probe_of_the_same_hardware_is_kept(tmp_path: Path) -> None:
    found = result(MEASURED, REQUEST, IDENTITY, Published())
    path = keep(found, tmp_path / "hardware")
    assert path.name.startswith(IDENTITY.digest)
    assert last_kept(IDENTITY.digest, path.parent) == json.loads(json.dumps(found.to_json()))
    (path.parent / f"{IDENTITY.digest}-29990101T000000Z.json").write_text("{")
    assert last_kept(IDENTITY.digest, path.parent) is not None, "one that is broken is passed over"
    assert last_kept("other", path.parent) is None


def test_arrays_are_beyond_the_cache_and_the_format_is_the_devices_own() -> None:
    cpu = Cpu("Some CPU", ("avx2",), 2, 1, Absent(""), Absent(""), 2**20)
    assert request_for(False, cpu, 2).dtype == "float32"
    assert request_for(False, cpu, 2).copy_bytes == 2**28
    assert request_for(False, cpu, 2, dtype="bfloat16").dtype == "bfloat16"
    assert (request_for(True, cpu, 2).device, request_for(True, cpu, 2).copy_bytes) == ("cuda", 2**30)


def test_a_child_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = child(tmp_path, monkeypatch, "import sys, json; json.dump({'got': json.load(sys.stdin)}, sys.stdout)")
    assert run_child(REQUEST, module)["got"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("text", "says", "is_missing"),
    [
        ("import sys; sys.stderr.write('torch is not installed'); sys.exit(4)", "torch is not installed", True),
        ("raise MemoryError('too much')", "the probe failed: MemoryError: too much", False),
    ],
)
def test_a_child_that_fails_says_why(
    text: str, says: str, is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProbeFailed, match=says) as failure:
        run_child(REQUEST, child(tmp_path, monkeypatch, text))
    assert failure.value.is_missing == is_missing


def test_the_real_child_without_torch_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(tmp_path, monkeypatch, "")
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    with pytest.raises(ProbeFailed, match="torch is not installed: pip install"):
        run_child(REQUEST)


def test_the_real_child_on_a_torch_of_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of the rates, with a torch that does nothing."""
    (tmp_path / "torch.py").write_text(
        "class T:\n"
        "    def numel(self): return 8\n"
        "    def element_size(self): return 4\n"
        "    def copy_(self, other): pass\n"
        "    def to(self, dtype): return self\n"
        "def _t(*a, **k): return T()\n"
        "ones = empty = empty_like = randn = _t\n"
        "def mm(a, b, out=None): pass\n"
        "float32 = bfloat16 = None\n"
        "__version__ = 'paper'\n"
        "def set_num_threads(n): pass\n"
        "def get_num_threads(): return 2\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    found = run_child(Request("cpu", "bfloat16", 2**20, 2, 1.0))
    assert (found["torch"], found["num_threads"], found["matrix_size"]) == ("paper", 2, 1024)
    assert min(found["copy_bytes_per_s"] + found["operations_per_s"]) > 0


def test_the_command_shows_class_fingerprint_and_what_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "workbench.yaml").write_text("models: {}\npools: []\n")
    config = load_config(tmp_path / "workbench.yaml")
    assert run_app(["hardware", "--device", "cpu", "--json", "--config", str(config.file)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["hardware_class"], shown["measured"], shown["published"]["provenance"]) == ("cpu", None, "published")
    assert any(fact["value"] is None and fact["absent"] for fact in shown["facts"])
    identity = HardwareFingerprint(**shown["covers"])
    assert identity.digest == shown["fingerprint"]
    keep(result(MEASURED, REQUEST, identity, config.hardware["cpu"]), config.data_dir / "hardware")
    assert run_app(["hardware", "--device", "cpu", "--config", str(config.file)]) == 0
    text = capsys.readouterr().out
    assert "copy bandwidth" in text and "too few repeats" in text and "25%" in text
