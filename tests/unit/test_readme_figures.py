"""The README's block of figures: its form, and how rounds become a line."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.readme_figures import BEGIN, COLUMNS, END, MODELS, NoFigures, Row, block, rewritten, rows_of

README = Path(__file__).parents[2] / "README.md"
NUMBER = r"\d+(?:\.\d+)?"
LINE = re.compile(
    rf"\| (\S+) \| (\d+) \| ({NUMBER}) \(({NUMBER}) – ({NUMBER})\) \| {NUMBER} \| {NUMBER} \| {NUMBER} \|"
)


def costs(rate: float, low: float | None, high: float | None, concurrency: int = 4) -> pd.DataFrame:
    row = {"model": "m", "concurrency": concurrency, "output_tokens_per_s_per_gpu": rate, "ci_low": low}
    prices = {"usd_per_million_input_tokens": 1 / rate, "usd_per_million_output_tokens": 10 / rate}
    return pd.DataFrame([row | {"ci_high": high, "ttft_p50_s": 0.1} | prices])


def test_the_readme_holds_both_models_with_intervals_around_their_figures() -> None:
    page = README.read_text("utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    inside = page.partition(BEGIN)[2].partition(END)[0]
    assert "| " + " | ".join(COLUMNS) + " |" in inside
    lines = [match.groups() for match in map(LINE.fullmatch, inside.splitlines()) if match]
    assert {model for model, *_ in lines} == set(MODELS)
    assert len({(model, concurrency) for model, concurrency, *_ in lines}) == len(lines) >= 4
    assert all(0 < float(low) <= float(rate) <= float(high) for _, _, rate, low, high in lines)
    for fact in ("core of", "in brackets", "commit", "an hour", "make figures"):
        assert fact in page


def test_rounds_become_a_median_and_the_hull_of_their_intervals() -> None:
    [row] = rows_of([costs(100.0, 95.0, 104.0), costs(110.0, 108.0, 112.0), costs(90.0, 89.0, 96.0)])
    assert (row.tokens_per_s, row.low, row.high) == (100.0, 89.0, 112.0)
    assert row.usd_output == pytest.approx(0.1)


@pytest.mark.parametrize(
    "rounds", [[costs(100.0, None, 104.0)], [costs(1.0, 1.0, 1.0), costs(1.0, 1.0, 1.0, concurrency=8)]]
)
def test_a_figure_without_interval_or_round_is_none(rounds: list[pd.DataFrame]) -> None:
    with pytest.raises(NoFigures):
        rows_of(rounds)


def test_only_the_block_is_rewritten_and_its_lines_can_be_read_again() -> None:
    new = block([Row("m", 4, 100.0, 89.0, 112.0, 0.1, 0.01, 0.1)], "told")
    page = rewritten(f"before\n{BEGIN}\nold\n{END}\nafter\n", new)
    assert page == f"before\n{new}\nafter\n"
    assert any(LINE.fullmatch(line) for line in page.splitlines())
    with pytest.raises(NoFigures, match="the page has no"):
        rewritten("no markers", new)
