"""A figure that is not there, with its reason: shown and stored as absent, never as zero."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands where a value would; `reason` says why there is none and, if something helps, what does."""

    reason: str

    def __str__(self) -> str:
        return f"absent: {self.reason}"
