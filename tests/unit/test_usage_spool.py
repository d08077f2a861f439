"""The spool: events reach the disk one by one, half lines are repaired, a full disk costs nobody their request."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.clock import ManualClock
from serving.metering.events import BrokenEvent, encode
from serving.metering.segments import closed_segments, read_events, segments
from serving.metering.spool import SpoolCounts, SpoolSettings, UsageSpool
from tests.unit.usage_examples import an_event

LINE_BYTES = len(encode(an_event(id="0"), "/gateway/a"))


def ids(folder: Path) -> list[str]:
    return [event.id for event in read_events(folder)]


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """A file of this process takes no byte beyond `num_bytes`: what a full disk looks like to one that is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_event_can_be_read_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    with UsageSpool(tmp_path, "a", clock=ManualClock()) as spool:
        for number in range(3):
            spool.append(an_event(id=str(number)))
            assert ids(tmp_path) == [str(n) for n in range(number + 1)]
        assert closed_segments(tmp_path) == []
    assert ids(tmp_path) == ["0", "1", "2"]
    assert len(closed_segments(tmp_path)) == 1


def test_segments_turn_over_by_size_and_sort_by_time(tmp_path: Path) -> None:
    clock = ManualClock()
    with (
        UsageSpool(tmp_path, "a", clock=clock, settings=SpoolSettings(max_segment_bytes=2 * LINE_BYTES)) as spool,
        UsageSpool(tmp_path, "b", clock=clock) as other,
    ):
        for number in range(4):
            spool.append(an_event(id=str(number)))
            clock.advance(1.0)
        other.append(an_event(id="4"))
    assert ids(tmp_path) == ["0", "1", "2", "3", "4"]
    assert len(closed_segments(tmp_path)) == 3


def test_segments_turn_over_by_age_without_traffic(tmp_path: Path) -> None:
    clock = ManualClock()
    with UsageSpool(tmp_path, "a", clock=clock, settings=SpoolSettings(max_segment_age_s=300)) as spool:
        spool.append(an_event(id="0"))
        clock.advance(299)
        spool.tick()
        assert closed_segments(tmp_path) == []
        clock.advance(1)
        spool.tick()
        assert len(closed_segments(tmp_path)) == 1
        spool.tick()
    assert len(segments(tmp_path)) == 1


def test_segments_of_one_moment_have_names_of_their_own(tmp_path: Path) -> None:
    clock = ManualClock()
    for number in range(3):
        with UsageSpool(tmp_path, "a", clock=clock) as spool:
            spool.append(an_event(id=str(number)))
    assert ids(tmp_path) == ["0", "1", "2"]


def test_half_a_line_of_a_dead_worker_is_taken_away_and_counted(tmp_path: Path) -> None:
    left = tmp_path / "usage-20231114T000000.000000Z-a.open"
    left.write_bytes(encode(an_event(id="whole"), "/gateway/a") + encode(an_event(id="half"), "/gateway/a")[:-20])
    assert ids(tmp_path) == ["whole"]
    seen: list[SpoolCounts] = []
    with UsageSpool(tmp_path, "a", clock=ManualClock(), on_counts=seen.append) as spool:
        assert spool.counts == SpoolCounts(num_torn=1)
        spool.append(an_event(id="next"))
    assert seen == [SpoolCounts(num_torn=1)]
    assert ids(tmp_path) == ["whole", "next"]
    assert left.with_suffix(".jsonl").read_bytes().endswith(b"\n")


def test_a_segment_of_nothing_but_half_a_line_goes(tmp_path: Path) -> None:
    left = tmp_path / "usage-20231114T000000.000000Z-a.open"
    left.write_bytes(b'{"specversion"' + b" " * 100_000)
    with UsageSpool(tmp_path, "b", clock=ManualClock()) as spool:
        assert spool.counts.num_torn == 1
    assert segments(tmp_path) == []


def test_the_segment_of_a_living_worker_is_left_alone(tmp_path: Path) -> None:
    clock = ManualClock()
    with UsageSpool(tmp_path, "a", clock=clock) as spool:
        spool.append(an_event(id="0"))
        with UsageSpool(tmp_path, "b", clock=clock) as other:
            other.append(an_event(id="1"))
        spool.append(an_event(id="2"))
        assert len(closed_segments(tmp_path)) == 1
    assert sorted(ids(tmp_path)) == ["0", "1", "2"]


def test_those_who_live_close_what_a_worker_left_that_nobody_replaced(tmp_path: Path) -> None:
    clock = ManualClock()
    with UsageSpool(tmp_path, "a", clock=clock, settings=SpoolSettings(adopt_s=60)) as spool:
        (tmp_path / "usage-20231114T000000.000000Z-b.open").write_bytes(encode(an_event(), "/gateway/b"))
        clock.advance(60)
        spool.tick()
        assert len(closed_segments(tmp_path)) == 1


def test_a_full_disk_keeps_events_in_memory_and_writes_them_when_it_can(tmp_path: Path) -> None:
    clock = ManualClock()
    with UsageSpool(tmp_path, "a", clock=clock) as spool:
        spool.append(an_event(id="0"))
        with files_end_at(int(1.5 * LINE_BYTES)):  # the second event fits in half
            for number in range(1, 4):
                spool.append(an_event(id=str(number)))
            assert spool.counts == SpoolCounts(num_backlog=3)
            clock.advance(1.0)
            spool.append(an_event(id="4"))
            assert spool.counts == SpoolCounts(num_backlog=4)
        assert ids(tmp_path) == ["0"]
        clock.advance(1.0)
        spool.tick()
        assert spool.counts == SpoolCounts()
        spool.append(an_event(id="5"))
    assert ids(tmp_path) == ["0", "1", "2", "3", "4", "5"]


def test_what_memory_does_not_hold_is_lost_and_counted(tmp_path: Path) -> None:
    folder, clock, seen = tmp_path / "spool", ManualClock(), list[SpoolCounts]()
    settings = SpoolSettings(max_backlog_bytes=2 * LINE_BYTES)
    with UsageSpool(folder, "a", clock=clock, settings=settings, on_counts=seen.append) as spool:
        shutil.rmtree(folder)
        for number in range(4):
            spool.append(an_event(id=str(number)))
        assert spool.counts == SpoolCounts(num_backlog=2, num_lost=2)
        folder.mkdir()
        clock.advance(1.0)
        spool.tick()
    assert seen[-1] == SpoolCounts(num_lost=2)
    assert ids(folder) == ["0", "1"]


def test_closing_with_a_full_disk_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "spool"
    spool = UsageSpool(folder, "a", clock=ManualClock())
    shutil.rmtree(folder)
    spool.append(an_event())
    spool.close()
    assert spool.counts == SpoolCounts(num_lost=1)
    assert "1 usage events are lost" in caplog.text


def test_an_event_that_cannot_be_written_costs_the_request_nothing(tmp_path: Path) -> None:
    with UsageSpool(tmp_path, "a", clock=ManualClock()) as spool:
        spool.append(an_event(num_output_tokens=2**70))
        spool.append(an_event(ended_at_s=float("nan")))
        assert spool.counts == SpoolCounts(num_lost=2)


def test_a_worker_that_cannot_write_or_has_no_name_for_a_file_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        UsageSpool(tmp_path / "file", "a")
    with pytest.raises(ValueError, match="worker's id"):
        UsageSpool(tmp_path, "../a")


def test_a_reader_is_told_of_lines_that_are_no_events(tmp_path: Path) -> None:
    path = tmp_path / "usage-20231114T000000.000000Z-a.jsonl"
    path.write_bytes(b"\0\0\n" + encode(an_event(id="1"), "/gateway/a"))
    broken: list[str] = []
    assert [event.id for event in read_events(tmp_path, broken.append)] == ["1"]
    assert len(broken) == 1
    assert f"{path}, line 1" in broken[0]
    with pytest.raises(BrokenEvent, match="line 1"):
        list(read_events(tmp_path))
