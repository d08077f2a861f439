"""A rollout's split at the gateway: sticky sessions, the right share, no version but the one chosen."""

from __future__ import annotations

import math
from dataclasses import replace

from serving.core.split import Split
from serving.core.state import Model, Pool, Replica, ReplicaState, RoutingTable, Task
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from tests.gateway.fleets import MODEL, MakeEngine, MakeGateway, a_pool, a_table
from tests.gateway.wire import CHAT, Answer, chat, post

SPLIT = Split("r1", "1", "2", 0.25)


def a_candidate(url: str, state: ReplicaState = ReplicaState.READY) -> Pool:
    return replace(a_pool("new", {}), version="2", replicas=(Replica("new-0", url, state),))


def split_table(split: Split, *pools: Pool) -> RoutingTable:
    return replace(a_table(*pools), models=(Model(MODEL, Task.GENERATE, "1", ("1", "2"), 0.25, split),))


async def ask(gateway: Gateway, session: str | None = None, *, model: str = MODEL, **body: object) -> Answer:
    headers = [] if session is None else [(b"x-session-id", session.encode())]
    return await post(gateway, CHAT, chat(model=model, max_tokens=1, **body), headers)


def version_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.headers["x-served-by"].split("; ")[1]


async def test_sessions_are_split_and_stay(make_gateway: MakeGateway, make_engine: MakeEngine) -> None:
    old, new = await make_engine(), await make_engine()
    pools = (a_pool("old", {"old-0": old.url}), a_candidate(new.url))
    gateway = await make_gateway(table=split_table(SPLIT, *pools))
    first = [version_of(await ask(gateway, f"s{number}")) for number in range(300)]
    assert abs(first.count("2") - 75) <= 4 * math.sqrt(300 * 0.25 * 0.75)
    assert [version_of(await ask(gateway, f"s{number}")) for number in range(30)] == first[:30]
    assert len(new.log.ended) == (first + first[:30]).count("2")
    assert version_of(await ask(gateway, "s0", model="m@1")) == "1"
    assert version_of(await ask(gateway, "s0", model="m@2")) == "2"


async def test_a_session_without_a_name_is_known_by_its_beginning(
    make_gateway: MakeGateway, make_engine: MakeEngine
) -> None:
    old, new = await make_engine(), await make_engine()
    table = split_table(replace(SPLIT, share_frac=0.5), a_pool("old", {"old-0": old.url}), a_candidate(new.url))
    gateway = await make_gateway(table=table)
    seen = set()
    for number in range(12):
        turn = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"question {number}"}]
        later = [*turn, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
        versions = [version_of(await ask(gateway, messages=messages)) for messages in (turn, later, turn)]
        assert len(set(versions)) == 1
        seen |= set(versions)
        keyed = [version_of(await ask(gateway, prompt_cache_key=f"k{number}", messages=m)) for m in (turn, later)]
        assert len(set(keyed)) == 1
    assert seen == {"1", "2"}


async def test_a_candidate_that_warms_up_costs_nobody_an_error(make_gateway: MakeGateway, engine: FakeEngine) -> None:
    table = split_table(
        replace(SPLIT, share_frac=1.0),
        a_pool("old", {"old-0": engine.url}),
        a_candidate("http://127.0.0.1:9", ReplicaState.STARTING),
    )
    gateway = await make_gateway(table=table)
    assert {version_of(await ask(gateway, f"s{number}")) for number in range(20)} == {"1"}


async def test_failover_never_crosses_versions(make_gateway: MakeGateway, make_engine: MakeEngine) -> None:
    old, new = await make_engine(), await make_engine()
    candidate = a_candidate("http://127.0.0.1:9")
    candidate = replace(candidate, replicas=(*candidate.replicas, Replica("new-1", new.url, ReplicaState.READY)))
    table = split_table(replace(SPLIT, share_frac=1.0), a_pool("old", {"old-0": old.url}), candidate)
    gateway = await make_gateway(table=table)
    assert {version_of(await ask(gateway, f"s{number}")) for number in range(20)} == {"2"}
    assert not old.log.ended
    await new.__aexit__(None, None, None)
    assert {(await ask(gateway, f"s{number}")).status for number in range(3)} == {503}
    assert not old.log.ended
