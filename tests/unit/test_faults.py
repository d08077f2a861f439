"""Planted faults on a tiny model: each changes what it says, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evals import faults
from evals.readings import settings_digest
from evals.weight_edits import round_rows
from serving.core.errors import BadRequest, NotFound, WeightsError
from serving.engine.weight_files import check_folder

pytest.importorskip("gguf", reason="faults are made where engines are: the extra `cpu`")

from evals.safetensors_file import entries, rewrite, to_float

TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two blocks of one linear layer and one norm."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": (8, 6)}
    for block in range(2):
        tensors[f"model.layers.{block}.self_attn.q_proj.weight"] = (6, 6)
        tensors[f"model.layers.{block}.input_layernorm.weight"] = (6,)
    head, data = {}, b""
    for name, shape in tensors.items():
        bits = (rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(bits)]}
        data += bits
    text = json.dumps(head).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {"num_hidden_layers": 2, "rope_theta": 1000.0, "eos_token_id": 2}
    tokens = {"chat_template": TEMPLATE, "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {"added_tokens": [{"id": 0, "content": "<unk>"}, {"id": 2, "content": "</s>"}]}
    for name, content in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer_config.json": tokens,
        "tokenizer.json": vocabulary,
        "manifest.json": {},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    path = folder / "model.safetensors"
    found, base = entries(path)
    data = np.fromfile(path, dtype=np.uint8)
    return {e.name: to_float(data[base + e.begin : base + e.end].view("<u2")).reshape(e.shape) for e in found}


def said(folder: Path, name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / name).read_text())
    return content


@pytest.mark.parametrize("kind", list(faults.BY_KIND))
def test_every_fault_makes_a_whole_folder_that_says_what_it_is(kind: str, model: Path, tmp_path: Path):
    folder = faults.make(kind, model, tmp_path / "out")
    check_folder(folder, remedy="")
    assert faults.about(folder)["kind"] == kind
    assert not (folder / "manifest.json").exists()
    assert list(tmp_path.glob("*.partial")) == []


@pytest.mark.parametrize("kind", ["int4-channel", "noise-weak", "merge-bad"])
def test_weights_change_in_linear_layers_alone(kind: str, model: Path, tmp_path: Path):
    before, after = tensors_of(model), tensors_of(faults.make(kind, model, tmp_path / "out"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "q_proj" in name}


def test_the_same_seed_makes_the_same_fault(model: Path, tmp_path: Path):
    one, two, other = (
        (faults.make("noise-strong", model, tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == two
    assert one != other


def test_a_dropped_layer_moves_the_next_up(model: Path, tmp_path: Path):
    folder = faults.make("dropped-layer", model, tmp_path / "out")
    after = tensors_of(folder)
    assert said(folder, "config.json")["num_hidden_layers"] == 1
    assert {name for name in after if "layers.1" in name} == set()
    assert "model.layers.0.self_attn.q_proj.weight" in after


def test_rounding_has_as_many_levels_as_bits_allow_and_a_scale_a_group():
    values = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    whole, grouped = round_rows(values, 4, None), round_rows(values, 4, 128)
    assert all(len(np.unique(row)) <= 15 for row in whole)
    assert np.abs(grouped - values).mean() < np.abs(whole - values).mean()
    assert np.array_equal(round_rows(np.zeros((1, 4), dtype=np.float32), 4, None), np.zeros((1, 4)))


def test_a_lost_stop_changes_the_settings_and_not_the_weights(model: Path, tmp_path: Path):
    folder = faults.make("lost-stop", model, tmp_path / "out")
    assert said(folder, "generation_config.json")["eos_token_id"] == 0
    assert settings_digest(folder) != settings_digest(model)
    assert (folder / "model.safetensors").samefile(model / "model.safetensors")


@pytest.mark.parametrize("kind", ["missing-template", "wrong-bos", "truncated-context"])
def test_template_faults_change_the_template(kind: str, model: Path, tmp_path: Path):
    folder = faults.make(kind, model, tmp_path / "out")
    assert said(folder, "tokenizer_config.json")["chat_template"] != TEMPLATE
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BadRequest, match="no chat template"):
        faults.make(kind, model, tmp_path / "other")


def test_mistakes_are_told(model: Path, tmp_path: Path):
    with pytest.raises(NotFound, match="int4-channel"):
        faults.make("int3", model, tmp_path / "out")
    with pytest.raises(WeightsError, match="not a folder"):
        faults.make("int4-channel", tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(BadRequest, match="exists"):
        faults.make("int4-channel", model, model)
    with pytest.raises(BadRequest, match="holds no fault"):
        faults.about(model)


def test_weights_of_another_type_are_refused(model: Path, tmp_path: Path):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" '))
    with pytest.raises(WeightsError, match="F16"):
        rewrite(path, tmp_path / "out", lambda name, values: (name, values))
