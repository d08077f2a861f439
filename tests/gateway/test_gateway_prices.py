"""Prices steer traffic: two pools of one model, their prices swapped and then expired under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.state import CostRow, RoutingPolicy, RoutingTable
from serving.gateway.app import Gateway
from serving.store.routing_table import FileRoutingTable
from tests.gateway.fleets import MakeEngine, MakeGateway, a_pool, a_table
from tests.gateway.test_gateway_described import a_row
from tests.gateway.wire import CHAT, chat, metric, post

CHEAP_USD, DEAR_USD = 2.0, 6.0
NUM_REQUESTS, NUM_AT_ONCE = 240, 12


def priced(table: RoutingTable, epoch: int, *, a: float, b: float, expires_at_s: float = 4e9) -> RoutingTable:
    """`table` with prices per million tokens for pools a and b, input and output alike."""

    def row(pool: str, usd: float) -> CostRow:
        return a_row(
            engine_fingerprint=pool,
            usd_per_million_input_tokens=usd,
            usd_per_million_output_tokens=usd,
            expires_at_s=expires_at_s,
        )

    return replace(table, epoch=epoch, cost_rows=(row("a", a), row("b", b)))


async def split(gateway: Gateway) -> tuple[dict[str, float], float]:
    """Share of each pool under load, and the usd that the gateway expected the requests to cost."""
    begun_usd = metric(gateway, "workbench_usd_total")
    pools: Counter[str] = Counter()

    async def stream() -> None:
        for _ in range(NUM_REQUESTS // NUM_AT_ONCE):
            answer = await post(gateway, CHAT, chat(stream=True, max_tokens=4))
            pools[answer.headers["x-served-by"].partition(";")[0]] += 1

    await asyncio.gather(*(stream() for _ in range(NUM_AT_ONCE)))
    usd = metric(gateway, "workbench_usd_total") - begun_usd
    return {pool: number / NUM_REQUESTS for pool, number in pools.items()}, usd


async def test_the_split_and_the_money_follow_the_prices(
    make_engine: MakeEngine, make_gateway: MakeGateway, tmp_path: Path
) -> None:
    first, second = await make_engine(), await make_engine()
    pools = (
        replace(a_pool("a", {"a1": first.url}), engine_fingerprint="a"),
        replace(a_pool("b", {"b1": second.url}), engine_fingerprint="b"),
    )
    # In flight against price: under load, the cheaper pool takes more until its queue outweighs its price.
    policy = RoutingPolicy(weights={"in_flight": 1.0, "cost": 1.0}, in_flight_scale=4.0)
    table = a_table(*pools, policy=policy)
    gateway = await make_gateway(table=priced(table, 1, a=CHEAP_USD, b=DEAR_USD))
    file = FileRoutingTable(tmp_path / "routing-table.json")

    shares, usd = await split(gateway)
    assert 0.6 < shares["a"] < 1.0
    per_request = usd / NUM_REQUESTS / (shares["a"] * CHEAP_USD + shares["b"] * DEAR_USD)

    await file.publish(priced(table, 2, a=DEAR_USD, b=CHEAP_USD))
    assert await gateway.refresh_table()
    swapped, swapped_usd = await split(gateway)
    assert swapped["b"] == pytest.approx(shares["a"], abs=0.1)
    expected_usd = per_request * NUM_REQUESTS * (swapped["a"] * DEAR_USD + swapped["b"] * CHEAP_USD)
    assert swapped_usd == pytest.approx(expected_usd, rel=1e-6)

    await file.publish(priced(table, 3, a=CHEAP_USD, b=DEAR_USD, expires_at_s=1.0))
    assert await gateway.refresh_table()
    unpriced, unpriced_usd = await split(gateway)
    assert unpriced["a"] == pytest.approx(0.5, abs=0.1)
    assert unpriced_usd == 0.0
    for pool in ("a", "b"):
        assert metric(gateway, "workbench_cost_rows_state", pool=pool, state="expired") == 1
        assert metric(gateway, "workbench_cost_rows_state", pool=pool, state="fresh") == 0
