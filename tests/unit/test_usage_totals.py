"""Totals of usage events, and `workbench usage` over a spool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.metering.events import Waste, retried_id
from serving.metering.spool import UsageSpool
from tests.unit.usage_examples import ENDED_AT_S, an_event
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.usage import UsageGroup, UsageTotals, summed, totals

DAY, DAY_S = "2023-11-14", 86_400.0


def test_requests_add_up_by_day_tenant_and_model() -> None:
    events = [
        an_event(id="1"),
        an_event(id="2", usd=None),
        an_event(id="3", tenant="lab", model="n"),
        an_event(id="4", ended_at_s=ENDED_AT_S + DAY_S),
        an_event(id="1"),  # delivered twice
    ]
    found = totals(events)
    assert list(found) == [
        UsageGroup(DAY, "acme", "m"),
        UsageGroup(DAY, "lab", "n"),
        UsageGroup("2023-11-15", "acme", "m"),
    ]
    assert found[UsageGroup(DAY, "acme", "m")] == UsageTotals(
        num_requests=2, num_prompt_tokens=200, num_cached_tokens=128, num_output_tokens=64, usd=0.25, num_unpriced=1
    )
    assert summed(found.values()).num_requests == 4
    assert list(totals(events, since_day="2023-11-15")) == [UsageGroup("2023-11-15", "acme", "m")]
    assert list(totals(events, until_day=DAY, model="m")) == [UsageGroup(DAY, "acme", "m")]
    assert list(totals(events, tenant="lab")) == [UsageGroup(DAY, "lab", "n")]


def test_waste_is_counted_apart_and_a_first_attempt_is_no_request() -> None:
    events = [
        an_event(id="1"),
        an_event(id=retried_id("1", 1), waste=Waste.RETRIED, num_output_tokens=0, usd=0.1),
        an_event(id="2", waste=Waste.ABANDONED, status=499),
        an_event(id="3", replayed=True, num_prompt_tokens=0, num_cached_tokens=0, num_output_tokens=0, usd=0.0),
    ]
    total = summed(totals(events).values())
    assert (total.num_requests, total.num_failed, total.num_replayed) == (3, 1, 1)
    assert (total.num_prompt_tokens, total.num_output_tokens) == (300, 64)
    assert (total.num_wasted_tokens, total.wasted_usd) == (232, pytest.approx(0.35))
    assert (total.usd, total.num_unpriced) == (pytest.approx(0.6), 0)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "usage"
    with UsageSpool(folder, "a") as writer:
        for number in range(3):
            writer.append(an_event(id=str(number)))
    return folder


def test_the_command_prints_a_table_and_json(spool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["usage", "--folder", str(spool), "--json"]) == Exit.OK
    data = json.loads(capsys.readouterr().out)
    assert (
        data["rows"][0] | {"day": DAY, "tenant": "acme", "num_requests": 3, "num_output_tokens": 96} == data["rows"][0]
    )
    assert data["total"]["usd"] == pytest.approx(0.75)
    assert run_app(["usage", "--folder", str(spool)]) == Exit.OK
    assert "0.750000" in capsys.readouterr().out
    assert run_app(["usage", "--folder", str(spool), "--since", "2030-01-01"]) == Exit.OK
    assert "no usage" in capsys.readouterr().out


def test_lines_that_cannot_be_read_are_shown_and_fail_the_command(
    spool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with next(spool.iterdir()).open("ab") as file:
        file.write(b"{}\n")
    assert run_app(["usage", "--folder", str(spool), "--json"]) == Exit.FAILED
    answer = capsys.readouterr()
    assert json.loads(answer.out)["total"]["num_requests"] == 3
    assert "line 4: it lacks 'dataschema'" in answer.err


@pytest.mark.parametrize("arguments", [["--since", "yesterday"], ["--folder", "/nowhere"]])
def test_a_wrong_option_is_a_usage_error(arguments: list[str], spool: Path) -> None:
    assert run_app(["usage", "--folder", str(spool), *arguments]) == Exit.USAGE
