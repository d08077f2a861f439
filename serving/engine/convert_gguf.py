"""GGUF → bf16 safetensors in Hugging Face's layout, because vLLM cannot run GGUF on a CPU.

Run in a child process: `python -m serving.engine.convert_gguf FILE.gguf FOLDER`. Progress and the outcome
are JSON lines on stdout: {"progress": …}, then {"done": …} or {"error": …, "disk_full": bool}.

Block formats are unpacked by the `gguf` package and rounded to bf16 (nearest even) piece by piece, so
memory stays near the file's own size. Nothing is computed but what undoes llama.cpp's own export:

    llama   rows of q and k were interleaved for its rotary layout: put back in halves
    gemma3  norm weights were stored plus one: minus one

Known architectures: llama, gemma3 (text).
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from serving.engine import gguf_config, gguf_tokenizer
from serving.engine.bf16 import to_bf16
from serving.engine.gguf_file import GgufError, GgufHeader, TensorInfo, read_header

_PIECE_ELEMENTS = 1 << 20
_COMMON = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
}
_BLOCK_NAMES = {
    "llama": _COMMON | {"ffn_norm.weight": "post_attention_layernorm.weight"},
    "gemma3": _COMMON
    | {
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    },
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(name: str, architecture: str) -> str:
    """Hugging Face's name of a tensor; GgufError when it has none here."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    if (match := re.fullmatch(r"blk\.(\d+)\.(.+)", name)) and match[2] in _BLOCK_NAMES[architecture]:
        return f"model.layers.{match[1]}.{_BLOCK_NAMES[architecture][match[2]]}"
    raise GgufError(f"tensor {name} is not known for the architecture {architecture}")


def write_safetensors(file: IO[bytes], header: GgufHeader, data: np.ndarray) -> int:
    """Writes all tensors as bf16, in the file's order. Returns the number of bytes written."""
    architecture = header.metadata["general.architecture"]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in header.tensors:
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        entries[hf_name(tensor.name, architecture)] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    for tensor in header.tensors:
        for piece in _bf16_pieces(tensor, header.metadata, data):
            file.write(piece.data)
    return 8 + len(head) + end


def output_size_bytes(header: GgufHeader) -> int:
    """Bytes that the conversion needs on disk: two a weight, and room for the tokenizer."""
    weights = 2 * sum(int(np.prod(tensor.shape)) for tensor in header.tensors)
    return weights + 256 * len(header.metadata["tokenizer.ggml.tokens"])


def _raw_rows(tensor: TensorInfo, data: np.ndarray) -> np.ndarray:
    kind = GGMLQuantizationType(tensor.ggml_type)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    num_rows, width = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
    row_bytes = width // block * block_bytes
    end = tensor.offset_bytes + num_rows * row_bytes
    if end > data.size:
        raise GgufError(f"the file is cut off: {tensor.name} ends at byte {end:,}, the file at {data.size:,}")
    return data[tensor.offset_bytes : end].reshape(num_rows, row_bytes)


def _bf16_pieces(tensor: TensorInfo, metadata: dict[str, Any], data: np.ndarray) -> Iterator[np.ndarray]:
    architecture = metadata["general.architecture"]
    rows = _raw_rows(tensor, data)
    if architecture == "llama" and (match := re.search(r"attn_([qk])\.weight$", tensor.name)):
        key = "head_count" if match[1] == "q" else "head_count_kv"
        num_heads = int(metadata[f"llama.attention.{key}"])
        # Whole rows move, so this is done before they are unpacked.
        rows = rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    step = max(1, _PIECE_ELEMENTS // tensor.shape[-1])
    for start in range(0, len(rows), step):
        # One long row: the package unpacks 16 rows at a time, which is slow for short ones.
        piece = np.ascontiguousarray(rows[start : start + step]).reshape(1, -1)
        values = dequantize(piece, GGMLQuantizationType(tensor.ggml_type))
        if architecture == "gemma3" and tensor.name.endswith("norm.weight"):
            values = values - 1.0
        yield to_bf16(values)


def convert(source: Path, folder: Path) -> None:
    """Writes config, tokenizer and weights of `source` into `folder`.

    Raises:
        GgufError: the file is broken, or of an architecture or tokenizer that is not known.
        OSError: the disk is full.
    """
    header = read_header(source)
    if (architecture := header.metadata.get("general.architecture")) not in _BLOCK_NAMES:
        raise GgufError(f"architecture {architecture!r} cannot be converted; known: {', '.join(_BLOCK_NAMES)}")
    _check_space(folder, output_size_bytes(header))
    _write_json(folder / "config.json", gguf_config.model_config(header))
    _write_json(folder / "generation_config.json", gguf_config.generation_config(header.metadata))
    _say(progress=f"converting {len(header.tensors)} tensors of {source.name} to bf16")
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, header, np.memmap(source, dtype=np.uint8, mode="r"))
    _say(progress="writing the tokenizer")
    _write_json(folder / "tokenizer.json", gguf_tokenizer.tokenizer_json(header.metadata))
    _write_json(folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(header.metadata))


def _check_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes / 1e6:,.0f} MB needed, {free_bytes / 1e6:,.0f} MB free")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Converts and reports on stdout. Returns the exit code."""
    source, folder = map(Path, arguments)
    try:
        convert(source, folder)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        _say(error=error.strerror if full else str(error), disk_full=full)
        return 1
    except GgufError as error:
        _say(error=str(error), disk_full=False)
        return 1
    _say(done=str(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
