"""What every benchmark shares: its command line, its table, its JSON and its exit code.

    python -m benchmarks.NAME [--quick] [--json FILE]

    {"mode": "quick" | "full", "bars": [{"name", "value", "bar", "ok"}], "machine": {…}, "commit": "…"}

`ok` is null for a bar that this form of the benchmark shows but cannot judge.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent


class Mode(StrEnum):
    """The full form is the bar; the quick one judges what a few minutes allow."""

    QUICK = "quick"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure and what it is held to. `ok` None: shown, not judged."""

    name: str
    value: float | str
    bar: str
    ok: bool | None


def at_most(name: str, value: float, limit: float, *, judged: bool = True) -> Bar:
    """A figure that must not exceed `limit`."""
    return Bar(name, value, f"<= {limit:g}", _verdict(value <= limit, judged))


def at_least(name: str, value: float, limit: float, *, judged: bool = True) -> Bar:
    """A figure that must reach `limit`."""
    return Bar(name, value, f">= {limit:g}", _verdict(value >= limit, judged))


def equal_to(name: str, value: float | str, expected: float | str, *, judged: bool = True) -> Bar:
    """A figure or word that must be exactly `expected`."""
    return Bar(name, value, f"= {expected}", _verdict(value == expected, judged))


def _verdict(ok: bool, judged: bool) -> bool | None:
    return ok if judged else None


def run(name: str, measure: Callable[[Mode, Console], Sequence[Bar]], argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark from its command line.

    Args:
        name: of the module.
        measure: does the measuring; prints its progress on the console.
        argv: arguments; those of the process by default.

    Returns:
        The exit code: 0 when every judged bar holds, else 1.

    Raises:
        ValueError: a figure is NaN or infinite, or nothing was judged.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=measure.__doc__)
    parser.add_argument("--quick", action="store_true", help="at most five minutes; judges only what it can")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    arguments = parser.parse_args(argv)
    mode = Mode.QUICK if arguments.quick else Mode.FULL
    console = Console()
    # As Ctrl-C: asyncio then cancels what runs, and the processes that the benchmark has started end with it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    bars = measure(mode, console)
    for bar in bars:
        if isinstance(bar.value, float) and not math.isfinite(bar.value):
            raise ValueError(f"{bar.name} is {bar.value}: a figure must be finite")
    if all(bar.ok is None for bar in bars):
        raise ValueError(f"benchmarks.{name} judged nothing")
    console.print(_table(name, mode, bars))
    if arguments.json is not None:
        result = {"mode": mode.value, "bars": [asdict(bar) for bar in bars], "machine": machine(), "commit": commit()}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if any(bar.ok is False for bar in bars) else 0


def _table(name: str, mode: Mode, bars: Sequence[Bar]) -> Table:
    table = Table(title=f"benchmarks.{name} ({mode.value})", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("")
    for bar in bars:
        value = f"{bar.value:.4g}" if isinstance(bar.value, float) else str(bar.value)
        table.add_row(bar.name, value, bar.bar, {True: "[green]ok", False: "[red]FAILS", None: "[dim]shown"}[bar.ok])
    return table


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        cpu = next(models, cpu)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "num_cores": os.cpu_count() or 1,
        "memory_gb": round(memory_bytes / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that was measured, with `-dirty` when the working tree differs from it; `unknown` outside git."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return described.stdout.strip() or "unknown"
