"""Which hardware class a GPU belongs to, by the names and memory sizes of the configuration's own table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Protocol

from workbench.config_layers import parse_yaml

# A driver counts GiB, a data sheet GB, and both leave out what the device keeps for itself.
MEMORY_FROM, MEMORY_TO = 0.9, 1.1
_MEMORY_SUFFIX = re.compile(r"-\d+g$")


class UnknownHardware(Exception):
    """A device that belongs to no hardware class; the message says what to set."""


class Sized(Protocol):
    """What this needs of a class: `workbench.config.HardwareClass` has it."""

    @property
    def memory_gb(self) -> float:
        """Memory of one device."""
        ...


def class_of(device: str, memory_gib: float, memory_gb: Mapping[str, float]) -> str:
    """The class of a GPU: its name holds the words of the class, and its memory is the class's within 10 %.

    Args:
        device: the name that the driver gives, e.g. `NVIDIA A100-SXM4-80GB`.
        memory_gib: the memory that the driver gives.
        memory_gb: memory of each class by its name; `a100-80g` stands for devices named `… A100 …`.

    Raises:
        UnknownHardware: none fits.
    """
    words = f" {device.lower().replace('-', ' ')} "
    for name, size_gb in memory_gb.items():
        marker = _MEMORY_SUFFIX.sub("", name).replace("-", " ")
        if f" {marker} " in words and MEMORY_FROM <= memory_gib / size_gb <= MEMORY_TO:
            return name
    raise UnknownHardware(
        f"GPU {device!r} with {memory_gib:.0f} GiB belongs to no known hardware class ({', '.join(memory_gb)}); "
        f"add a class under `hardware:` in workbench.yaml, named as the device is (`b200-180g` for a B200), "
        f"or name its class in the pool"
    )


def sizes(classes: Mapping[str, Sized]) -> dict[str, float]:
    """Memory by class, of a configuration's `hardware` table."""
    return {name: known.memory_gb for name, known in classes.items()}


@cache
def packaged_sizes() -> Mapping[str, float]:
    """Memory by class of the packaged table, for who has no configuration at hand."""
    source = files("workbench") / "defaults.yaml"
    table = parse_yaml(source.read_text(encoding="utf-8"), "defaults.yaml")
    return {name: float(known["memory_gb"]) for name, known in table["hardware"].items()}
