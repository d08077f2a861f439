"""The reports of a schedule in `reports/NAME/`: the oldest go, an index page lists what is there."""

from __future__ import annotations

import html
import urllib.parse
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from workbench.schedule.history import Run

UNFINISHED = "-interrupted"
FAILED = "-failed"
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd}"
    ".ok{color:#176639}.regression,.failed{color:#a11}.inconclusive,.timed_out,.interrupted{color:#8a5a00}"
)


def mark_unfinished(folder: Path, since_s: float) -> Path | None:
    """Renames the notebook that an attempt since then left without its page; returns it."""
    for path in sorted(folder.glob("*.ipynb"), reverse=True):
        is_named = path.stem.endswith((UNFINISHED, FAILED))
        if not is_named and path.stat().st_mtime >= since_s and not path.with_suffix(".html").exists():
            return path.rename(path.with_name(f"{path.stem}{UNFINISHED}.ipynb"))
    return None


def retire(folder: Path, keep: int, spared: Collection[str]) -> list[Path]:
    """Takes away the oldest executed notebooks and pages beyond `keep`; returns what went.

    Args:
        folder: of one schedule; other files in it stay.
        keep: how many reports stay, a notebook and its page being one.
        spared: notebooks that stay whatever their age, such as the accepted run's.
    """
    notebooks = sorted(folder.glob("*.ipynb"), key=lambda path: (path.stat().st_mtime, path.name), reverse=True)
    gone = []
    for path in notebooks[keep:]:
        if str(path) in spared:
            continue
        for file in (path, path.with_suffix(".html")):
            if file.exists():
                file.unlink()
                gone.append(file)
    return gone


def write_index(reports: Path, runs: dict[str, list[Run]]) -> Path:
    """Writes `reports/index.html`: each schedule's runs, then all other pages; newest first.

    Args:
        reports: the folder.
        runs: of each schedule, oldest first.
    """
    parts = []
    listed = set()
    for name, ended in sorted(runs.items()):
        rows = []
        for run in reversed(ended):
            page = None if run.html is None else Path(run.html)
            if page is not None and page.exists() and page.is_relative_to(reports):
                listed.add(page)
            rows.append(_row(run, page if page in listed else None, reports))
        parts.append(f"<h2>{html.escape(name)}</h2><table><tr><th>began<th>outcome<th>report<th>why</tr>")
        parts += [*rows, "</table>"]
    others = [path for path in reports.rglob("*.html") if path not in listed and path != reports / "index.html"]
    if others:
        parts.append("<h2>Other reports</h2><ul>")
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            parts.append(f"<li>{_link(path, reports)}</li>")
        parts.append("</ul>")
    reports.mkdir(parents=True, exist_ok=True)
    index = reports / "index.html"
    partial = index.with_name("index.html.partial")
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Reports</title><style>{_STYLE}</style><h1>Reports</h1>"
    )
    partial.write_text(head + "\n".join(parts) + "</html>\n", encoding="utf-8")
    return partial.replace(index)


def _row(run: Run, page: Path | None, reports: Path) -> str:
    began = datetime.fromtimestamp(run.began_at_s).strftime("%Y-%m-%d %H:%M")
    report = "–" if page is None else _link(page, reports)
    why = html.escape("; ".join([run.reason, *run.compared, *run.remarks]).strip("; "))
    return f'<tr><td>{began}<td class="{run.outcome}">{run.outcome}<td>{report}<td>{why}</tr>'


def _link(path: Path, reports: Path) -> str:
    relative = path.relative_to(reports)
    return f'<a href="{urllib.parse.quote(relative.as_posix())}">{html.escape(relative.as_posix())}</a>'
