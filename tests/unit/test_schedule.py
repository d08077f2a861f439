"""Parts of scheduled runs: cron lines, the crontab, the rule, history, missed runs, reports, alerts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.cells import make_cell
from workbench.schedule import crontab, shelf
from workbench.schedule.alerts import Alert, tell
from workbench.schedule.book import Book, CompareRule, NoSuchSchedule, Schedule, ScheduleExists, ScheduleRuns
from workbench.schedule.cron import BadCronLine, check, last_due_s, missed_s, next_due_s
from workbench.schedule.files import ScheduleBroken, locked, read_lines
from workbench.schedule.history import MAX_ATTEMPTS, RESUME_WITHIN_S, Outcome, Run
from workbench.schedule.rule import judge_by_ratio
from workbench.schedule.watch import overdue_s, tell_once
from workbench.sweeps.cells import CellResult

METRIC = "output_tokens_per_s_per_gpu"
RULE = CompareRule(metric=METRIC, tolerance_frac=0.05)


def local(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def schedule(name: str = "nightly", **changes: Any) -> Schedule:
    fields = {"name": name, "cron": "30 2 * * *", "notebook": "01", "created_at_s": local("2026-11-01 12:00")}
    return Schedule(**(fields | changes))


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "schedules")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("@daily", "write @daily as"),
        ("* * * *", "4 fields"),
        ("* * * * * *", "6 fields"),
        ("61 * * * *", "bad minute"),
        ("0 0 31 2 *", "bad day-of-month"),
        ("0 2 * * *\n0 3 * * *", "10 fields"),
    ],
)
def test_a_cron_line_that_cron_would_refuse_is_refused(line: str, says: str) -> None:
    with pytest.raises(BadCronLine, match=says):
        check(line)


def test_due_times_are_local() -> None:
    assert check(" 30  2 * * mon-fri ") == "30 2 * * mon-fri"
    now = local("2026-11-30 08:00")
    assert next_due_s("30 2 * * *", now) == local("2026-12-01 02:30")
    assert last_due_s("30 2 * * *", now) == local("2026-11-30 02:30")


@pytest.mark.parametrize(
    ("now", "last_began", "missed"),
    [
        ("2026-11-30 02:59", "2026-11-29 02:30", None),  # within its grace
        ("2026-11-30 03:01", "2026-11-29 02:30", "2026-11-30 02:30"),
        ("2026-11-30 03:01", "2026-11-30 02:29", None),  # a clock that was set
        ("2026-11-30 03:01", "2026-11-30 02:50", None),
        ("2026-11-30 03:01", None, "2026-11-30 02:30"),
        ("2026-12-03 03:01", "2026-11-29 02:30", "2026-12-03 02:30"),  # the newest is named
    ],
)
def test_a_run_that_never_came_is_found(now: str, last_began: str | None, missed: str | None) -> None:
    began_s = None if last_began is None else local(last_began)
    found = missed_s("30 2 * * *", now_s=local(now), since_s=0.0, grace_s=1800.0, last_began_s=began_s)
    assert found == (None if missed is None else local(missed))


def test_what_was_due_before_the_schedule_was_made_is_not_missed() -> None:
    made_s = local("2026-11-30 12:00")
    line, now_s = "30 2 * * *", local("2026-11-30 13:00")
    assert missed_s(line, now_s=now_s, since_s=made_s, grace_s=60.0, last_began_s=None) is None


@pytest.mark.parametrize(
    "changes",
    [{"name": "../up"}, {"name": "a b"}, {"cron": "x"}, {"webhook": "file:///etc/passwd"}, {"time_limit_minutes": 0},
     {"keep_reports": 0}, {"compare": {"metric": METRIC, "tolerance_frac": float("nan")}}, {"unknown": 1}],
)  # fmt: skip
def test_a_schedule_is_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        schedule(**changes)


def test_the_book_keeps_schedules_for_their_owner_alone(book: Book) -> None:
    one = schedule(webhook="https://hooks.example.com/secret", compare=RULE, parameters={"concurrencies": [1, 4]})
    book.add(one)
    assert (book.names(), book.get("nightly")) == (["nightly"], one)
    assert (book.folder / "nightly" / "schedule.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ScheduleExists, match="--replace"):
        book.add(one)
    book.add(schedule(cron="0 3 * * *"), replaces=True)
    assert book.get("nightly").cron == "0 3 * * *"
    with pytest.raises(NoSuchSchedule, match="there are nightly"):
        book.get("weekly")
    with locked(book.lock_path("nightly")), pytest.raises(ScheduleRuns):
        book.remove("nightly")
    book.remove("nightly")
    assert book.names() == []


def test_a_broken_file_is_named(book: Book) -> None:
    book.add(schedule())
    path = book.folder / "nightly" / "schedule.json"
    path.write_text("{")
    with pytest.raises(ScheduleBroken, match=str(path)):
        book.all()


@pytest.fixture
def cron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """A `crontab` on PATH that keeps its table in a file; returns a reader of it."""
    table, folder = tmp_path / "table", tmp_path / "bin"
    folder.mkdir()
    script = folder / "crontab"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -l ]; then [ -f {table} ] && exec cat {table}; '
        f'echo "no crontab for you" >&2; exit 1; fi\ncat > {table}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: table.read_text() if table.exists() else ""


def test_cron_has_our_lines_and_keeps_everybody_elses(book: Book, cron: Callable[[], str], tmp_path: Path) -> None:
    mine = "MAILTO=me\n5 4 * * * backup"
    (tmp_path / "table").write_text(mine)
    config = tmp_path / "a folder" / "workbench.yaml"
    book.add(schedule())
    book.add(schedule("hand", in_crontab=False))
    file, installed = crontab.install(book, config)
    assert installed
    lines = cron().splitlines()
    assert lines[:2] == mine.splitlines()
    [run] = [line for line in lines if "run-now" in line]
    assert run.startswith(f"30 2 * * * cd '{config.parent}' && ")
    assert f"run-now nightly --config '{config}' >>{book.folder}/nightly/cron.log 2>&1" in run
    assert sum("schedule status" in line for line in lines) == 1
    assert "run-now hand" in file.read_text(), "the file has the lines for other timers too"
    before = cron()
    crontab.install(book, config)
    assert cron() == before, "a second time changes nothing"
    book.remove("nightly")
    crontab.install(book, config)
    assert cron() == mine + "\n"


def test_percent_signs_are_escaped_and_a_block_without_end_is_not_guessed_at(
    book: Book, cron: Callable[[], str], tmp_path: Path
) -> None:
    book.add(schedule())
    crontab.install(book, tmp_path / "100%" / "workbench.yaml")
    assert "/100\\%/workbench.yaml" in cron()
    broken = "\n".join(cron().splitlines()[:-1]) + "\nmine\n"
    (tmp_path / "table").write_text(broken)
    with pytest.raises(crontab.CrontabFailed, match="without its end"):
        crontab.install(book, tmp_path / "workbench.yaml")
    assert cron() == broken


def test_without_cron_there_is_a_file(book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    book.add(schedule())
    file, installed = crontab.install(book, tmp_path / "workbench.yaml")
    assert not installed
    assert "run-now nightly" in file.read_text()


def test_a_crontab_that_fails_is_not_overwritten(book: Book, cron: Callable[[], str], tmp_path: Path) -> None:
    script = tmp_path / "bin" / "crontab"
    script.write_text("#!/bin/sh\necho 'you are not allowed to use this program' >&2; exit 1\n")
    book.add(schedule())
    with pytest.raises(crontab.CrontabFailed, match="not allowed"):
        crontab.install(book, tmp_path / "workbench.yaml")
    assert cron() == ""


def cell(rate: float, spread: float = 0.01, **changes: Any) -> CellResult:
    return make_cell(
        metrics={METRIC: rate, "ttft_s/p50": 10 / rate},
        intervals={METRIC: (rate * (1 - spread), rate * (1 + spread))},
        **changes,
    )


@pytest.mark.parametrize(
    ("newest", "outcome", "says"),
    [
        ([cell(100.0)], Outcome.OK, "0.0% better"),
        ([cell(120.0)], Outcome.OK, "20.0% better"),
        ([cell(96.0)], Outcome.OK, "4.0% worse: within 5.0%"),
        ([cell(90.0)], Outcome.REGRESSION, "10.0% worse"),
        ([cell(90.0, spread=0.2)], Outcome.OK, "intervals touch: no difference shown"),
        ([cell(90.0), cell(99.0), cell(98.0)], Outcome.OK, "2.0% worse"),  # the median of three
        ([], Outcome.INCONCLUSIVE, "no valid cell was measured since the run began"),
        ([cell(90.0, invalid="too few")], Outcome.INCONCLUSIVE, "no valid cell"),
        ([cell(90.0, engine_fingerprint="other")], Outcome.INCONCLUSIVE, "engine_fingerprint changed"),
        ([cell(100.0, concurrency=8)], Outcome.INCONCLUSIVE, "another plan changed"),
        ([cell(90.0, weak=(METRIC,))], Outcome.INCONCLUSIVE, "the sample is too small to carry"),
    ],
)
def test_the_rule(newest: list[CellResult], outcome: Outcome, says: str) -> None:
    judged = judge_by_ratio([cell(100.0)], newest, RULE)
    assert judged.outcome is outcome
    assert says in "\n".join(judged.lines)


def test_the_rule_knows_which_way_is_better_and_what_is_missing() -> None:
    rule = CompareRule(metric="ttft_s/p50", tolerance_frac=0.05)
    slower = judge_by_ratio([cell(100.0)], [cell(50.0)], rule)
    assert (slower.outcome, slower.worst_loss_frac) == (Outcome.REGRESSION, pytest.approx(1.0))
    assert "(no interval)" in slower.lines[0]
    both = [cell(100.0), cell(200.0, concurrency=8)]
    assert judge_by_ratio(both, [cell(100.0)], RULE).outcome is Outcome.INCONCLUSIVE
    assert judge_by_ratio(both, [cell(80.0)], RULE).outcome is Outcome.REGRESSION, "what is worse stays worse"


def test_a_run_that_was_cut_off_is_gone_on_with(book: Book) -> None:
    history = book.history("nightly")
    first = history.begin(1000.0, "a")
    again = history.begin(2000.0, "b")
    assert (first.attempt, again) == (1, Run("a", 1000.0, 2, 2000.0))
    history.end(Run("a", 1000.0, 2, 2000.0, 2500.0, Outcome.TIMED_OUT))
    third = history.begin(3000.0, "c")
    assert (third.run_id, third.began_at_s, third.attempt) == ("a", 1000.0, 3)
    history.end(Run("a", 1000.0, 3, 3000.0, 3500.0, Outcome.OK))
    assert history.begin(4000.0, "d").run_id == "d"
    assert [run.outcome for run in history.runs()] == [Outcome.OK]


def test_a_run_that_was_cut_off_too_often_or_long_ago_is_given_up(book: Book) -> None:
    history = book.history("nightly")
    for attempt in range(MAX_ATTEMPTS):
        assert history.begin(float(attempt), "a").run_id == "a"
    assert history.begin(100.0, "b") == Run("b", 100.0, 1, 100.0)
    assert history.begin(200.0 + RESUME_WITHIN_S, "c").run_id == "c"
    assert [(run.run_id, run.outcome) for run in history.runs()] == [
        ("a", Outcome.INTERRUPTED), ("b", Outcome.INTERRUPTED),
    ]  # fmt: skip


def test_a_torn_line_of_the_history_is_left_out(book: Book) -> None:
    history = book.history("nightly")
    history.end(Run("a", 1.0, outcome=Outcome.OK))
    with (history.folder / "runs.jsonl").open("a") as file:
        file.write('{"run_id": "b"')
    assert [run.run_id for run in history.runs()] == ["a"]


def test_a_missed_run_is_told_of_once_and_again_while_the_webhook_fails(book: Book) -> None:
    one = schedule()
    book.add(one)
    now_s, told = local("2026-11-30 08:00"), []
    answers: Iterator[str | None] = iter(["the webhook answered 500", None])

    def alert(_: Schedule, alert: Alert) -> str | None:
        told.append(alert)
        return next(answers)

    due_s = overdue_s(book, one, now_s)
    assert due_s == local("2026-11-30 02:30")
    assert [tell_once(book, one, due_s, alert) for _ in range(3)] == ["the webhook answered 500", None, None]
    assert [(alert.kind, alert.text) for alert in told] == [
        ("overdue", "the run that was due at 2026-11-30 02:30 never came")
    ] * 2
    book.history("nightly").see(skipped_at_s=local("2026-11-30 02:30:01"))
    assert overdue_s(book, one, now_s) is None, "it came, and found another going on"
    with locked(book.lock_path("nightly")):
        assert overdue_s(book, one, local("2026-12-02 08:00")) is None, "it runs"


def report(folder: Path, stem: str, at_s: float, page: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in (".ipynb", ".html") if page else (".ipynb",):
        path = folder / f"{stem}{suffix}"
        path.write_text("x")
        os.utime(path, (at_s, at_s))
    return folder / f"{stem}.ipynb"


def test_the_oldest_reports_go_and_the_accepted_one_stays(tmp_path: Path) -> None:
    accepted = report(tmp_path, "01-1", 1.0)
    report(tmp_path, "01-2", 2.0)
    report(tmp_path, "01-3-failed", 3.0, page=False)
    report(tmp_path, "01-4", 4.0)
    (tmp_path / "notes.txt").write_text("mine")
    gone = shelf.retire(tmp_path, 2, [str(accepted)])
    assert [path.name for path in gone] == ["01-2.ipynb", "01-2.html"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["01-1.html", "01-1.ipynb", "01-3-failed.ipynb", "01-4.html", "01-4.ipynb", "notes.txt"]


def test_a_notebook_without_its_page_is_marked(tmp_path: Path) -> None:
    report(tmp_path, "01-1", 100.0)
    report(tmp_path, "01-2-failed", 100.0, page=False)
    report(tmp_path, "01-0", 1.0, page=False)
    cut_off = report(tmp_path, "01-3", 100.0, page=False)
    assert shelf.mark_unfinished(tmp_path, 50.0) == tmp_path / "01-3-interrupted.ipynb"
    assert not cut_off.exists()
    assert shelf.mark_unfinished(tmp_path, 50.0) is None


def test_the_index_lists_runs_and_other_reports_and_trusts_no_text(tmp_path: Path) -> None:
    page = report(tmp_path / "nightly", "01-1", 1.0).with_suffix(".html")
    report(tmp_path, "by hand", 2.0)
    runs = [
        Run("a", 1000.0, outcome=Outcome.OK, html=str(page)),
        Run("b", 2000.0, outcome=Outcome.FAILED, reason="<script>"),
        Run("c", 3000.0, outcome=Outcome.OK, html=str(tmp_path / "nightly" / "gone.html")),
    ]
    text = shelf.write_index(tmp_path, {"nightly": runs}).read_text()
    assert 'href="nightly/01-1.html"' in text and 'href="by%20hand.html"' in text
    assert "<script>" not in text and "gone.html" not in text and "index.html" not in text
    assert text.index("failed") < text.index("nightly/01-1.html"), "newest first"


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """A webhook: its address, what was posted, and the codes that it answers with (200 when none is left)."""
    posted: list[dict[str, Any]] = []
    codes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(codes.pop(0) if codes else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/secret", posted, codes
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("codes", "num_posts", "trouble"),
    [([], 1, None), ([500, 429], 3, None), ([404], 1, "answered 404"), ([500] * 3, 3, "answered 500")],
)
def test_an_alert_is_posted_and_always_written_down(
    codes: list[int], num_posts: int, trouble: str | None, hook: Any, tmp_path: Path
) -> None:
    url, posted, answers = hook
    answers += codes
    log = tmp_path / "alerts.jsonl"
    found = tell(Alert("nightly", "regression", "10 % worse"), log, url, now_s=5.0, sleep=lambda _: None)
    assert (found is None) == (trouble is None)
    assert trouble is None or (trouble in str(found) and "secret" not in str(found))
    assert len(posted) == num_posts
    assert posted[0]["text"] == "workbench schedule nightly: 10 % worse"
    [line] = read_lines(log)
    assert (line["kind"], line["at_s"], line["not_delivered"]) == ("regression", 5.0, found)
    assert "secret" not in log.read_text()


def test_a_webhook_that_is_not_there_fails_nothing(tmp_path: Path) -> None:
    trouble = tell(Alert("n", "failed", "x"), tmp_path / "log", "http://127.0.0.1:9/x", now_s=1.0, sleep=lambda _: None)
    assert trouble is not None and "does not answer" in trouble
