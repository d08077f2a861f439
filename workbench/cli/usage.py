"""`workbench usage`: who used how much of what, and what it cost, from the events that the gateway wrote."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.metering.segments import read_events
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, out, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.usage import UsageGroup, UsageTotals, summed, totals
from workbench.wiring import layout

COLUMNS = ["day", "tenant", "model", "requests", "failed", "prompt", "cached", "output", "usd", "wasted", "wasted usd"]
FIGURES = tuple(range(3, len(COLUMNS)))


def add_to(app: typer.Typer) -> None:
    """Makes `usage` a command of the tree."""
    app.command(
        epilog=epilog(
            "workbench usage",
            "workbench usage --tenant acme --since 2026-11-01 --until 2026-11-30 --json",
            codes=(Exit.OK, Exit.FAILED, Exit.USAGE),
        )
    )(usage)


def usage(
    since: Annotated[str | None, typer.Option(help="The first day (UTC), as YYYY-MM-DD.")] = None,
    until: Annotated[str | None, typer.Option(help="The last day, inclusive.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's requests.")] = None,
    model: Annotated[str | None, typer.Option(help="Only requests to this model.")] = None,
    folder: Annotated[Path | None, typer.Option(help="A spool of usage events; else that of the stack here.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Adds up tokens, usd, requests and waste by day, tenant and model. Exit 1 when lines could not be read."""
    since_day, until_day = _day("--since", since), _day("--until", until)
    spool = folder or layout(settings(config)).usage_dir
    if folder is not None and not folder.is_dir():
        raise CommandFailed(f"--folder: {folder} is no folder", Exit.USAGE)
    broken: list[str] = []
    events = read_events(spool, broken.append)
    found = totals(events, since_day=since_day, until_day=until_day, tenant=tenant, model=model)
    total = summed(found.values())
    rows = [asdict(group) | asdict(figures) for group, figures in found.items()]
    data = {"folder": str(spool), "rows": rows, "total": asdict(total), "broken_lines": broken}
    emit(data, as_json, lambda: _show(found, total, spool))
    if broken:
        for line in broken[:20]:
            err.print(line, highlight=False, markup=False)
        raise CommandFailed(f"{len(broken)} lines hold no usage event: the totals lack them")


def _day(option: str, given: str | None) -> str | None:
    if given is None:
        return None
    try:
        return date.fromisoformat(given).isoformat()
    except ValueError:
        raise CommandFailed(f"{option}: {given!r} is no day such as 2026-11-30", Exit.USAGE) from None


def _show(found: dict[UsageGroup, UsageTotals], total: UsageTotals, spool: Path) -> None:
    if not found:
        out.print(f"no usage in {spool}", highlight=False, markup=False)
        return
    rows = [[group.day, group.tenant, group.model, *_figures(figures)] for group, figures in found.items()]
    if len(rows) > 1:
        rows.append(["total", "", "", *_figures(total)])
    out.print(table(None, COLUMNS, rows, right=FIGURES))
    if total.num_unpriced:
        out.print(f"{total.num_unpriced} requests ran in pools without a cost row that counts: their usd is unknown")


def _figures(figures: UsageTotals) -> list[Any]:
    return [
        figures.num_requests,
        figures.num_failed,
        figures.num_prompt_tokens,
        figures.num_cached_tokens,
        figures.num_output_tokens,
        f"{figures.usd:.6f}",
        figures.num_wasted_tokens,
        f"{figures.wasted_usd:.6f}",
    ]
