"""Marks every test with its layer; signals act as in a terminal, however the tests were started."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LAYERS = ("unit", "invariants", "parity", "gateway", "integration", "live")

# A shell starts what it puts in the background with SIGINT ignored, nohup with SIGHUP ignored; children inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the marker of the test's folder and runs the layers from the fastest to the slowest."""
    for item in items:
        layer = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if layer in LAYERS:
            item.add_marker(layer)
    items.sort(key=_layer_order)


def _layer_order(item: pytest.Item) -> int:
    parts = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ("",)
    return LAYERS.index(parts[0]) if parts[0] in LAYERS else len(LAYERS)
