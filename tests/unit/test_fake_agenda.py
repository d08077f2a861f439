"""The fake engine's agenda: the order of times, a few things in a turn, and what was cancelled is not done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serving.engine.fake.agenda import MAX_IN_A_TURN, Agenda


async def test_what_is_due_is_done_in_the_order_of_its_times_a_few_in_a_turn() -> None:
    agenda, done = Agenda(), list[int]()
    now_s = asyncio.get_running_loop().time()
    for number in (3, 1, 2, 0, 4):
        agenda.at(now_s - 1.0 + number / 100.0, _note(done, number))
    turns = []
    while len(done) < 5:
        await asyncio.sleep(0)
        turns.append(len(done))
    assert done == [0, 1, 2, 3, 4]
    assert all(later - earlier <= MAX_IN_A_TURN for earlier, later in zip([0, *turns], turns, strict=False))


async def test_an_earlier_time_is_not_kept_waiting_by_a_later_one() -> None:
    agenda, done = Agenda(), asyncio.Event()
    loop = asyncio.get_running_loop()
    late = agenda.at(loop.time() + 3600.0, done.clear)
    agenda.at(loop.time(), done.set)
    await done.wait()
    late.cancel()


async def test_what_was_cancelled_is_not_done_and_holds_nothing_up() -> None:
    agenda, done, ended = Agenda(), list[int](), asyncio.Event()
    now_s = asyncio.get_running_loop().time()
    entries = [agenda.at(now_s, _note(done, number)) for number in range(3)]
    agenda.at(now_s, ended.set)
    entries[1].cancel()
    await ended.wait()
    entries[0].cancel()  # too late, which is no error
    assert done == [0, 2]


def _note(done: list[int], number: int) -> Callable[[], None]:
    return lambda: done.append(number)
