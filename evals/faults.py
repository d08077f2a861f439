"""Planted regressions: a model's folder made worse in a known way, to see whether evaluations and gates find it.

A fault of the model is a new folder: what it changes is written, every other file is a hard link (a copy across disks).
A fault of serving leaves the folder alone: its settings are for `evals/faulty_proxy.py`, which stands before an engine.
The file `FAULT` says which fault a folder holds. Nothing here is random but by a seed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evals import weight_edits
from evals.safetensors_file import Edit, rewrite
from serving.core.errors import BadRequest, NotFound, WeightsError
from serving.engine.weight_files import MANIFEST, check_folder

# Without a suffix: no part of the folder's digest, which is that of what the model answers.
ABOUT = "FAULT"
WEIGHTS = "model.safetensors"
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
KEPT_CHARACTERS = 200
MERGE_RANK = 8
Json = dict[str, Any]
MakeEdit = Callable[[Json, int], Edit]
EditFiles = Callable[[dict[str, Json]], None]


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """A fault of serving: what the proxy does to `share` of the requests, for good.

    Attributes:
        share: of requests, in (0, 1].
        temperature: put in place of what the request says.
    """

    share: float
    temperature: float


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault; exactly one of `weights`, `files` and `proxy` says what it does.

    Attributes:
        kind: its name.
        summary: what is wrong, in words.
        weights: makes the edit of the tensors from the model's config and a seed.
        config: changes config.json beside edited weights.
        files: changes small JSON files, given by name.
        proxy: a fault of serving.
    """

    kind: str
    summary: str
    weights: MakeEdit | None = None
    config: Callable[[Json], None] | None = None
    files: EditFiles | None = None
    proxy: ProxySettings | None = None


def _drop_layer(config: Json) -> None:
    config["num_hidden_layers"] -= 1


def _no_template(files: dict[str, Json]) -> None:
    _template_of(files)
    files["tokenizer_config.json"]["chat_template"] = PLAIN_TEMPLATE


def _truncated(files: dict[str, Json]) -> None:
    template = _template_of(files)
    cut = template.replace("message['content']", f"message['content'][-{KEPT_CHARACTERS}:]")
    if cut == template:
        raise BadRequest("this chat template does not name message['content'], so nothing can be cut there")
    files["tokenizer_config.json"]["chat_template"] = cut


def _wrong_bos(files: dict[str, Json]) -> None:
    _template_of(files)
    tokenizer_config = files["tokenizer_config.json"]
    token = _other_token(tokenizer_config)
    tokenizer_config["chat_template"] = token + tokenizer_config["chat_template"]


def _lost_stop(files: dict[str, Json]) -> None:
    tokenizer_config = files["tokenizer_config.json"]
    token = _other_token(tokenizer_config)
    token_id = next(t["id"] for t in files["tokenizer.json"]["added_tokens"] if t["content"] == token)
    tokenizer_config["eos_token"] = token
    for name in ("config.json", "generation_config.json"):
        files[name]["eos_token_id"] = token_id


def _wrong_rope(files: dict[str, Json]) -> None:
    config = files["config.json"]
    if "rope_theta" not in config:
        raise BadRequest("this model's config has no rope_theta")
    config["rope_theta"] /= 2
    if "rope_theta" in config.get("rope_parameters", {}):
        config["rope_parameters"]["rope_theta"] /= 2


def _template_of(files: dict[str, Json]) -> str:
    template = files["tokenizer_config.json"].get("chat_template")
    if not isinstance(template, str):
        raise BadRequest("this model has no chat template in tokenizer_config.json, so the fault does not apply to it")
    return template


def _other_token(tokenizer_config: Json) -> str:
    """A special token of the vocabulary that ends nothing: the one for unknown text."""
    token = tokenizer_config.get("unk_token")
    if not isinstance(token, str) or token == tokenizer_config.get("eos_token"):
        raise BadRequest("this model has no special token apart from the one that ends a turn")
    return token


def _rounding(num_bits: int, group_size: int | None) -> MakeEdit:
    return lambda config, seed: weight_edits.rounded(num_bits, group_size)


def _noise(sigmas: float) -> MakeEdit:
    return lambda config, seed: weight_edits.noisy(sigmas, seed)


def _merge(strength: float) -> MakeEdit:
    return lambda config, seed: weight_edits.merged(strength, MERGE_RANK, seed)


def _middle_layer(config: Json, seed: int) -> Edit:
    return weight_edits.without_block(config["num_hidden_layers"] // 2)


FAULTS: tuple[Fault, ...] = (
    Fault("int8-group128", "weights rounded to 8 bits, a scale per 128 inputs", weights=_rounding(8, 128)),
    Fault("int8-channel", "weights rounded to 8 bits, a scale per output", weights=_rounding(8, None)),
    Fault("int4-group128", "weights rounded to 4 bits, a scale per 128 inputs", weights=_rounding(4, 128)),
    Fault("int4-channel", "weights rounded to 4 bits, a scale per output", weights=_rounding(4, None)),
    Fault("noise-weak", "noise of 0.02 standard deviations on the weights", weights=_noise(0.02)),
    Fault("noise-middle", "noise of 0.05 standard deviations on the weights", weights=_noise(0.05)),
    Fault("noise-strong", "noise of 0.1 standard deviations on the weights", weights=_noise(0.1)),
    Fault("dropped-layer", "the middle layer is missing", weights=_middle_layer, config=_drop_layer),
    Fault("missing-template", "messages reach the model as bare text, without roles", files=_no_template),
    Fault("wrong-bos", "chats begin with a special token that the model was not trained on", files=_wrong_bos),
    Fault("truncated-context", f"only the last {KEPT_CHARACTERS} characters of a message arrive", files=_truncated),
    Fault("wrong-rope", "rotary positions turn by half the base", files=_wrong_rope),
    Fault("merge-weak", "a useless adapter merged at 2 % of the weights' norm", weights=_merge(0.02)),
    Fault("merge-bad", "a useless adapter merged at 20 % of the weights' norm", weights=_merge(0.2)),
    Fault("lost-stop", "the token that ends a turn no longer stops the answer", files=_lost_stop),
    Fault("stuck-temperature", "every request is sampled at temperature 1.5", proxy=ProxySettings(1.0, 1.5)),
    Fault("bad-1-percent", "1 % of requests are sampled at temperature 2", proxy=ProxySettings(0.01, 2.0)),
)
BY_KIND = {fault.kind: fault for fault in FAULTS}
_JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def make(kind: str, model: Path, output: Path, *, seed: int = 0) -> Path:
    """Writes the fault to `output`, complete or not at all. Returns `output`.

    Raises:
        NotFound: no such kind.
        BadRequest: `output` exists, or the fault does not apply to this model.
        WeightsError: no usable model folder, or the disk is full.
    """
    fault = BY_KIND.get(kind)
    if fault is None:
        raise NotFound(f"no fault {kind!r}; there are: {', '.join(BY_KIND)}")
    check_folder(model, remedy="Name a folder with the model's config, tokenizer and safetensors.")
    if output.exists():
        raise BadRequest(f"{output} exists: name a new folder")
    partial = output.with_name(output.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a call that died
        partial.mkdir(parents=True)
        _write(fault, model, partial, seed)
        partial.rename(output)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        remedy = "the disk is full; free space or name another folder" if full else str(error)
        raise WeightsError(f"cannot write {output}: {remedy}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output


def _write(fault: Fault, model: Path, folder: Path, seed: int) -> None:
    if fault.weights is not None:
        config = _json(model / "config.json")
        edit = fault.weights(config, seed)
        if not (model / WEIGHTS).is_file():
            raise WeightsError(f"{model} has no {WEIGHTS}: faults are made of models in one file")
        rewrite(model / WEIGHTS, folder / WEIGHTS, edit)
        if fault.config is not None:
            fault.config(config)
        _write_json(folder / "config.json", config)
    if fault.files is not None:
        before = {name: _json(model / name) for name in _JSON_FILES if (model / name).is_file()}
        _edit_files(fault.files, before, folder)
    _link_rest(model, folder)
    about = {"kind": fault.kind, "summary": fault.summary, "seed": seed, "model": str(model.resolve())}
    proxy = None if fault.proxy is None else asdict(fault.proxy)
    _write_json(folder / ABOUT, {**about, "proxy": proxy})


def about(folder: Path) -> Json:
    """What `make` wrote down of a folder.

    Raises:
        BadRequest: it holds no fault of ours.
    """
    try:
        return _json(folder / ABOUT)
    except (FileNotFoundError, NotADirectoryError):
        raise BadRequest(f"{folder} holds no fault: make one with `workbench faults make`") from None


def _edit_files(edit: EditFiles, files: dict[str, Json], folder: Path) -> None:
    before = json.dumps(files)
    try:
        edit(files)
    except KeyError as error:
        raise BadRequest(f"the fault does not apply to this model: it has no {error.args[0]}") from None
    for name, content in json.loads(before).items():
        if files[name] != content:
            _write_json(folder / name, files[name])


def _link_rest(model: Path, folder: Path) -> None:
    """Every file that the fault left alone, but the manifest: its digest is the sound model's."""
    for path in sorted(model.rglob("*")):
        target = folder / path.relative_to(model)
        if not path.is_file() or target.exists() or path.name == MANIFEST:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise
            shutil.copyfile(path, target)


def _json(path: Path) -> Json:
    content: Json = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
