"""The driver's library NVML through `nvidia-ml-py`, where that is installed: never needed, nvidia-smi says the same."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from workbench.absent import Absent

T = TypeVar("T")


@contextlib.contextmanager
def nvml(module: Any = None) -> Iterator[Any | Absent]:
    """The initialised library for the time of the block, or why there is none.

    Args:
        module: stands in for `pynvml`.
    """
    if module is None:
        try:
            module = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            yield Absent("the package nvidia-ml-py is not installed: pip install nvidia-ml-py")
            return
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        yield Absent(f"NVML does not start: {error}")
        return
    try:
        yield module
    finally:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()


def asked(module: Any, what: str, ask: Callable[[], T]) -> T | Absent:
    """The answer of one call, or why the device gives none."""
    try:
        return ask()
    except module.NVMLError as error:
        return Absent(f"{what}: {error}")
    except AttributeError:
        return Absent(f"{what}: this nvidia-ml-py cannot ask for it")


def text(value: str | bytes) -> str:
    """Names are bytes in older bindings."""
    return value.decode() if isinstance(value, bytes) else value
