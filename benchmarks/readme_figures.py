"""The README's figures: both models swept on this machine in rounds that take turns, the block rewritten.

    python -m benchmarks.readme_figures            uses the running stack, or starts one and ends it
    python -m benchmarks.readme_figures --quick    one round

A figure is the median of its rounds. Its interval is the hull of the rounds' 95 % intervals: never narrower than what
one run says of itself, and as wide as the rounds lie apart.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import pandas as pd

import workbench
from benchmarks.harness import REPOSITORY
from serving.engine.flags import engine_build
from workbench.hardware.cpu import read_cpu
from workbench.provenance import git_commit
from workbench.sweeps.cells import TargetKind
from workbench.wiring import running_stack

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
MODELS = ("smollm2-135m", "gemma3-270m")
CONCURRENCIES = (1, 4, 8, 16)
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 64, 32
ROUNDS = 3
START_S = 300.0
COLUMNS = ("model", "in flight", "output tokens/s a core", "TTFT p50 ms", "$ / M input", "$ / M output")


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the block: rates a core, times in seconds, prices in usd a million tokens."""

    model: str
    concurrency: int
    tokens_per_s: float
    low: float
    high: float
    ttft_p50_s: float
    usd_input: float
    usd_output: float


class NoFigures(Exception):
    """The block cannot be made; the message says why."""


def rows_of(rounds: Sequence[pd.DataFrame]) -> list[Row]:
    """Median and hull of each cell over the rounds, each a cost table of cells measured in front of the engine.

    Raises:
        NoFigures: a cell has no interval, or is not in every round.
    """
    frames = pd.concat(rounds, ignore_index=True)
    found = []
    for (model, concurrency), cells in frames.groupby(["model", "concurrency"], sort=False):
        figures = cells[["ci_low", "ci_high", "ttft_p50_s"]]
        if len(cells) * frames["model"].nunique() != len(rounds) or figures.isna().any(axis=None):
            raise NoFigures(f"{model} at {concurrency} in flight: {len(cells)} rounds count, or one has no interval")
        found.append(
            Row(
                str(model),
                int(str(concurrency)),
                median(cells["output_tokens_per_s_per_gpu"]),
                min(cells["ci_low"]),
                max(cells["ci_high"]),
                median(cells["ttft_p50_s"]),
                median(cells["usd_per_million_input_tokens"]),
                median(cells["usd_per_million_output_tokens"]),
            )
        )
    return found


def block(rows: Sequence[Row], told: str) -> str:
    """The markers, the table and what must be known of it."""
    lines = [BEGIN, "| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for row in rows:
        rate = f"{row.tokens_per_s:.1f} ({row.low:.1f} – {row.high:.1f})"
        cells = (row.model, str(row.concurrency), rate, f"{row.ttft_p50_s * 1000:.0f}", f"{row.usd_input:.3f}",
                 f"{row.usd_output:.3f}")  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", told, END])


def rewritten(page: str, new: str) -> str:
    """The page with the block between its markers replaced. Raises NoFigures."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise NoFigures(f"the page has no {BEGIN} … {END}")
    return before + new + after


def told(num_rounds: int, usd_per_hour: float, source: str) -> str:
    """Where, when and how the figures came about, in lines of at most 120 characters."""
    flavour, version = engine_build()
    cpu = read_cpu()
    return (
        f"One core of {cpu.model} for each engine ({flavour} {version}), {NUM_PROMPT_TOKENS} tokens in and "
        f"{NUM_OUTPUT_TOKENS} out,\n{datetime.now(UTC):%Y-%m-%d}, commit {git_commit()[:12]}. Median of {num_rounds} "
        "rounds in turns; in brackets the hull of their 95 % intervals.\n"
        f"Prices: ${usd_per_hour:g} an hour and core ({source})."
    )


def measured(models: Sequence[str], num_rounds: int) -> list[pd.DataFrame]:
    """A cost table a model and round; the order turns from round to round."""
    found = []
    for number in range(num_rounds):
        for model in models if number % 2 == 0 else tuple(reversed(models)):
            sweep = workbench.sweep(
                model,
                concurrencies=CONCURRENCIES,
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                num_output_tokens=NUM_OUTPUT_TOKENS,
                max_age_s=0.0,
            )
            costs = sweep.cost_table()
            found.append(costs[costs["target"] == TargetKind.ENGINE.value])
    return sorted(found, key=lambda frame: list(models).index(frame["model"].iloc[0]))


@contextmanager
def stack() -> Iterator[None]:
    """The running stack of the nearest workbench.yaml, or one of our own for as long as this takes."""
    config = workbench.connect().config
    if running_stack(config) is not None:
        yield
        return
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", "workbench", "up", "--no-lab", "--config", str(config.file)]
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"NO_COLOR": "1"})
        try:
            deadline_s = time.monotonic() + START_S
            while "Serving until" not in _said(out):
                if child.poll() is not None or time.monotonic() > deadline_s:
                    raise NoFigures(f"the stack did not start:\n{_said(out)[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            child.terminate()
            child.wait(120)


def _said(file: object) -> str:
    return Path(f"/proc/self/fd/{file.fileno()}").read_text(errors="replace")  # type: ignore[attr-defined]


def main() -> None:
    """Measures and rewrites the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of several")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "README.md", help="the page with the markers")
    given = parser.parse_args()
    num_rounds = 1 if given.quick else ROUNDS
    page = given.page.read_text("utf-8")
    rewritten(page, "")
    with stack():
        frames = measured(MODELS, num_rounds)
    first = frames[0].iloc[0]
    new = block(rows_of(frames), told(num_rounds, first["usd_per_gpu_hour"], first["usd_per_gpu_hour_source"]))
    given.page.write_text(rewritten(given.page.read_text("utf-8"), new), "utf-8")
    sys.stdout.write(new + "\n")


if __name__ == "__main__":
    try:
        main()
    except NoFigures as error:
        sys.exit(str(error))
