"""What the programs here share: a check that fails, and the lines that `benchmarks.clients` reads.

The programs run in the environments of the clients, where this repository is not installed: they find this file
because it lies beside them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def check(condition: object, what: object) -> None:
    """Fails the check that runs."""
    if not condition:
        raise AssertionError(repr(what)[:300])


def report(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Runs them all; writes a line each: its name, and why it failed or null."""
    for name, run in checks.items():
        try:
            run()
            why = None
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is the result
            why = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps({"check": name, "why": why}) + "\n")
