"""Rounding to bfloat16; apart from conversions, whose GGUF library takes seconds to import."""

from __future__ import annotations

import numpy as np


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 → bf16 bit patterns as uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
