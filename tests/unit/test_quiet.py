"""What a run does to the process that it is in, and that all of it is undone."""

from __future__ import annotations

import gc

from workbench.loadgen.quiet import quiet_process


def test_old_objects_are_not_collected_during_a_run_and_the_collector_is_as_before_after_it() -> None:
    before = gc.get_threshold()
    with quiet_process(collects=False):
        youngest, *older = gc.get_threshold()
        assert (youngest, older[0] > 10**6) == (before[0], True)
        with quiet_process(collects=False):  # two loads at once
            assert gc.get_threshold() == (youngest, *older)
        assert gc.get_threshold() == (youngest, *older)
    assert gc.get_threshold() == before


def test_the_collector_is_as_before_when_the_run_fails() -> None:
    before = gc.get_threshold()
    try:
        with quiet_process(collects=False):
            raise RuntimeError
    except RuntimeError:
        assert gc.get_threshold() == before
