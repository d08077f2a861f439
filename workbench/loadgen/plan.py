"""The requests of a run, encoded before it begins, and the schedule that they are sent by.

    planned ── sessions ── Share (all of it) ── cut into a Share a process

A schedule is one thing, made here from the run's seed; cutting it changes neither its times nor its ids.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile

from workbench.loadgen.arrivals import Arrival, ClosedLoop
from workbench.loadgen.client import Target, encode_headers, encode_request
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.records import RequestRecord, TokenSource


@dataclass(frozen=True, slots=True)
class Planned:
    """A request before it is sent.

    Attributes:
        asked: what is known of it by now; its times are not.
        is_exact: whether another output length than asked is a failure.
        think_s: pause before it when it is a later turn of a session.
        session: what it shares with the other turns of its session; None when it is one of its own.
    """

    asked: RequestRecord
    is_exact: bool
    think_s: float
    session: str | None
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def index(self) -> int:
        """Its number in the run."""
        return self.asked.index


Session = list[Planned]


@dataclass(frozen=True, slots=True)
class Share:
    """What one process sends: its sessions, and either how many users take them or when each begins.

    Attributes:
        sessions: in the order in which they begin.
        concurrency: users of a closed loop; None in an open one.
        times_s: of an open loop, when each session begins, from the run's start; sessions without a time are not sent.
        max_in_flight: requests of an open loop at once.
    """

    sessions: tuple[Session, ...]
    concurrency: int | None = None
    times_s: tuple[float, ...] = ()
    max_in_flight: int = 1

    @property
    def num_requests(self) -> int:
        """Requests in it, sent or not."""
        return sum(len(session) for session in self.sessions)

    @property
    def peak_rps(self) -> int:
        """Sessions that begin in the busiest second of an open loop."""
        return max(Counter(int(at_s) for at_s in self.times_s).values(), default=0)

    def cut(self, num_parts: int) -> list[Share]:
        """The same load in at most so many parts: dealt out one by one, as are the users of a closed loop.

        Every user keeps the sessions that are his turn, so that each part has its proportion of them.
        """
        if self.concurrency is not None:
            users = min(self.concurrency, max(1, len(self.sessions)))
            num_parts = min(num_parts, users)
            return [
                Share(
                    tuple(s for i, s in enumerate(self.sessions) if i % users % num_parts == part),
                    _dealt(users, num_parts, part),
                )
                for part in range(num_parts)
            ]
        num_parts = min(num_parts, self.max_in_flight, max(1, len(self.times_s)))
        due = self.sessions[: len(self.times_s)]
        return [
            Share(
                due[part::num_parts],
                None,
                self.times_s[part::num_parts],
                _dealt(self.max_in_flight, num_parts, part),
            )
            for part in range(num_parts)
        ]


def _dealt(number: int, num_parts: int, part: int) -> int:
    return number // num_parts + (part < number % num_parts)


def plan_requests(
    target: Target,
    prompts: Iterable[Prompt],
    *,
    cache_salt: str | None,
    count_by: TokenSource,
    run_id: str,
) -> list[Planned]:
    """The requests, encoded.

    Raises:
        ValueError: there are none.
    """
    planned = []
    for index, prompt in enumerate(prompts):
        request_id = f"{run_id}-{index}"
        path, body = encode_request(target, prompt, cache_salt=cache_salt, count_by=count_by)
        session_id = None if prompt.session_id is None else f"{run_id}-{prompt.session_id}"
        headers = encode_headers(target, request_id, session_id)
        is_exact = target.has_extras and not prompt.may_stop
        asked = _asked(target, prompt, index, request_id)
        planned.append(Planned(asked, is_exact, prompt.think_s, prompt.session_id, path, headers, body))
    if not planned:
        raise ValueError("no prompts: a load run needs at least one request")
    return planned


def _asked(target: Target, prompt: Prompt, index: int, request_id: str) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        index=index,
        task=target.task,
        num_prompt_tokens=prompt.num_prompt_tokens,
        num_output_tokens_asked=prompt.num_output_tokens,
        intended_at_s=0.0,
        sent_at_s=0.0,
        adapter=prompt.adapter,
        tier=prompt.tier,
        session_id=prompt.session_id,
        turn=prompt.turn,
        is_prompt_estimated=prompt.is_estimated,
    )


def schedule(planned: list[Planned], arrival: Arrival, *, max_duration_s: float, seed: int) -> Share:
    """The whole load as one share: what begins when, as far as it begins within `max_duration_s`."""
    sessions = _sessions(planned)
    if isinstance(arrival, ClosedLoop):
        return Share(sessions, arrival.concurrency)
    times_s = takewhile(lambda at_s: at_s < max_duration_s, arrival.send_times_s(random.Random(f"{seed}/arrivals")))
    return Share(sessions, None, tuple(islice(times_s, len(sessions))), arrival.max_in_flight)


def _sessions(planned: list[Planned]) -> tuple[Session, ...]:
    """The requests by session, in the order of their first; one without a session is one of its own."""
    sessions: dict[object, Session] = {}
    for request in planned:
        sessions.setdefault(request.session or request.index, []).append(request)
    return tuple(sessions.values())
