"""What the figures were measured on: fingerprint, class, and a probe of what the device can give.

gpu.py cpu.py   what the machine says of itself; each fact a value, or absent with the reason
identity.py     the fingerprint whose digest stands on every row
classes.py      which class of the configuration a device belongs to
machine.py      all of it for people: facts, limits of the container, engine
probe.py        copy bandwidth and matrix rate, measured by a child process (ceilings.py) and kept with the digest
"""

from workbench.hardware.classes import UnknownHardware, class_of
from workbench.hardware.gpu import Gpu, gpus_here, parse_gpus
from workbench.hardware.identity import CPU_CLASS, HardwareFingerprint, fingerprint

__all__ = [
    "CPU_CLASS", "Gpu", "HardwareFingerprint", "UnknownHardware", "class_of", "fingerprint", "gpus_here", "parse_gpus",
]  # fmt: skip
