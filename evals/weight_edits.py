"""What weights suffer in a planted regression. Each edit takes a tensor's name and values and gives the new ones.

Rounding, noise and merges touch the linear layers of the blocks alone: embeddings and norms stay, as in common
quantizations.
"""

from __future__ import annotations

import re

import numpy as np

from evals.safetensors_file import Edit, Floats

_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


def rounded(num_bits: int, group_size: int | None) -> Edit:
    """Symmetric rounding to `num_bits`, with one scale per `group_size` inputs of a row, or per row."""
    return lambda name, values: (name, round_rows(values, num_bits, group_size) if _LINEAR.fullmatch(name) else values)


def round_rows(values: Floats, num_bits: int, group_size: int | None) -> Floats:
    """Rows (outputs × inputs) rounded to the nearest of 2**num_bits - 1 levels; a last group may be shorter."""
    width = values.shape[1]
    step = group_size or width
    parts = [_round(values[:, begin : begin + step], 2 ** (num_bits - 1) - 1) for begin in range(0, width, step)]
    return np.concatenate(parts, axis=1)


def _round(values: Floats, num_levels: int) -> Floats:
    scale = np.abs(values).max(axis=1, keepdims=True) / num_levels
    scale[scale == 0.0] = 1.0
    return np.asarray(np.rint(values / scale) * scale, dtype=np.float32)


def noisy(sigmas: float, seed: int) -> Edit:
    """Gaussian noise of `sigmas` times each tensor's own standard deviation."""
    rng = np.random.default_rng(seed)

    def edit(name: str, values: Floats) -> tuple[str, Floats]:
        if not _LINEAR.fullmatch(name):
            return name, values
        noise = rng.standard_normal(values.shape, dtype=np.float32)
        return name, values + noise * np.float32(sigmas * float(values.std()))

    return edit


def merged(strength: float, rank: int, seed: int) -> Edit:
    """A low-rank adapter that was trained for nothing, merged: its norm is `strength` times the tensor's own."""
    rng = np.random.default_rng(seed)

    def edit(name: str, values: Floats) -> tuple[str, Floats]:
        if not _LINEAR.fullmatch(name):
            return name, values
        outputs, inputs = values.shape
        up = rng.standard_normal((outputs, rank), dtype=np.float32)
        delta = up @ rng.standard_normal((rank, inputs), dtype=np.float32)
        scale = strength * float(np.linalg.norm(values)) / float(np.linalg.norm(delta))
        return name, values + np.float32(scale) * delta

    return edit


def without_block(number: int) -> Edit:
    """Drops block `number`; those after it move up."""

    def edit(name: str, values: Floats) -> tuple[str, Floats] | None:
        match = _BLOCK.fullmatch(name)
        if match is None or int(match[1]) < number:
            return name, values
        if int(match[1]) == number:
            return None
        return f"model.layers.{int(match[1]) - 1}.{match[2]}", values

    return edit
