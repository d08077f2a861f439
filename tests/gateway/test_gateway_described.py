"""What is said about the gateway stays what it does: OpenAPI, docs page, metrics, decision records."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import orjson
import pytest

from serving.core.policies.routing import replay
from serving.core.state import CostRow, RoutingPolicy
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.gateway.feedback import FEEDBACK
from serving.gateway.openai_routes import HOT_ROUTES, MODERATIONS
from serving.telemetry.decision_log import BrokenRecord, read
from serving.telemetry.logs import JsonFormatter
from tests.gateway.fleets import MakeEngine, MakeGateway, a_pool, a_row, a_table
from tests.gateway.wire import CHAT, chat, get, metric, post

UNITS = (
    "_total",
    "_seconds",
    "_bucket",
    "_sum",
    "_count",
    "_created",
    "_epoch",
    "_up",
    "_in_flight",
    "_state",
    "_waiting",
    "_lost",
)


async def test_hot_routes_and_openapi_are_equal(gateway: Gateway) -> None:
    schema = (await get(gateway, "/openapi.json")).json
    posts = {path for path, operations in schema["paths"].items() if "post" in operations}
    assert posts == {*HOT_ROUTES, FEEDBACK}
    for path in HOT_ROUTES:
        operation = schema["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["examples"]
        assert {"200", "400", "404", "413", "429", "502", "503"} <= operation["responses"].keys()


async def test_every_example_is_a_request_that_is_taken(gateway: Gateway) -> None:
    schema = (await get(gateway, "/openapi.json")).json
    for path in HOT_ROUTES:
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            answer = await post(gateway, path, example["value"])
            if path == MODERATIONS:
                assert answer.json["results"][0]["flagged"]
                continue
            assert (answer.status, answer.json["error"]["code"]) == (
                404,
                "model_not_found",
            )  # all but the name is right


async def test_the_docs_page_shows_every_route_and_needs_nothing_from_outside(gateway: Gateway) -> None:
    page = (await get(gateway, "/docs")).body.decode()
    assert all(path in page for path in HOT_ROUTES)
    assert "curl http://gateway.test/v1/chat/completions" in page
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["']?https?://(?!gateway\.test)""", page)


async def test_health_tells_the_table(gateway: Gateway) -> None:
    health = (await get(gateway, "/health")).json
    assert (health["status"], health["table_epoch"]) == ("ok", 1)


async def test_metrics_are_named_as_prometheus_wants_them(gateway: Gateway) -> None:
    await post(gateway, CHAT, chat(stream=True))
    answer = await get(gateway, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    names = {line.partition("{")[0].partition(" ")[0] for line in answer.body.decode().splitlines() if line[0] != "#"}
    assert names
    assert all(name.startswith("workbench_") and name.endswith(UNITS) for name in names)
    assert metric(gateway, "workbench_time_to_first_token_seconds_count", pool="pool-a") == 1
    assert metric(gateway, "workbench_routing_table_epoch") == 1


async def test_what_clients_send_makes_no_new_series(gateway: Gateway) -> None:
    async def ask(word: str) -> None:
        headers = [(b"x-request-id", word.encode()), (b"x-session-id", word.encode()), (b"user-agent", word.encode())]
        for model in (word, f"m@{word}", f"m+{word}", "m"):
            await post(gateway, CHAT, chat(model=model, user=word), headers)
        await post(gateway, CHAT, chat(service_tier=word))
        await post(gateway, CHAT, chat(fake={"status": 500}))
        await post(gateway, f"/v1/{word}", chat())
        await get(gateway, f"/v1/models/{word}?{word}={word}")

    await ask("first")
    before = {line.rpartition(" ")[0] for line in gateway.metrics.page().decode().splitlines()}
    for number in range(20):
        await ask(f"word-{number}")
    page = gateway.metrics.page().decode()
    assert {line.rpartition(" ")[0] for line in page.splitlines()} == before
    assert "word-" not in page


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (a_row(), "fresh"),
        (a_row(expires_at_s=1.0), "expired"),
        (a_row(engine_fingerprint="other"), "mismatch"),
        (a_row(version="2"), "unmeasured"),
    ],
)
async def test_the_state_of_cost_rows_shows(
    make_gateway: MakeGateway, engine: FakeEngine, row: CostRow, state: str
) -> None:
    pool = a_pool("pool-a", {"r1": engine.url})
    gateway = await make_gateway(table=a_table(pool, cost_rows=(row,), cost_table_run_id="run-7"))
    answer = await post(gateway, CHAT, chat())
    assert answer.headers["x-served-by"] == "pool-a; 1; 1/run-7"
    shown = {s: metric(gateway, "workbench_cost_rows_state", pool="pool-a", state=s) for s in ("fresh", state)}
    assert shown[state] == 1
    assert (metric(gateway, "workbench_usd_total") > 0) == (state == "fresh")
    assert metric(gateway, "workbench_cost_rows_state") == 1


async def test_decision_records_replay_to_the_same_decisions(
    make_engine: MakeEngine, make_gateway: MakeGateway, tmp_path: Path
) -> None:
    urls = {f"r{i}": (await make_engine()).url for i in range(5)}
    table = a_table(a_pool("pool-a", urls), cost_rows=(a_row(),), policy=RoutingPolicy(num_samples=2))
    folder = tmp_path / "decisions"
    gateway = await make_gateway(table=table, decision_log_path=folder, decision_log_frac=1.0)
    answers = [await post(gateway, CHAT, chat(service_tier="flex")) for _ in range(12)]
    assert {answer.status for answer in answers} == {200}
    records = list(read(folder))
    assert len(records) == 12
    assert [replay(record) for record in records] == [record.decision for record in records]
    assert b"one two three" not in next(folder.iterdir()).read_bytes()


async def test_a_record_cut_short_at_the_end_is_left_out_and_a_broken_one_named(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "decisions"
    gateway = await make_gateway(a_pool("pool-a", {"r1": engine.url}), decision_log_path=folder, decision_log_frac=1.0)
    await post(gateway, CHAT, chat())
    file = next(folder.iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:50])
    assert len(list(read(folder))) == 1
    file.write_bytes(whole[:50] + b"\n")
    with pytest.raises(BrokenRecord, match="line 1"):
        list(read(folder))


async def test_the_log_has_a_line_a_request_and_never_the_prompt(
    make_gateway: MakeGateway, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await make_gateway(a_pool("pool-a", {"r1": engine.url}), access_log="all")
    with caplog.at_level(logging.INFO, logger="serving.gateway"):
        await post(gateway, CHAT, chat(stream=True))
        await post(gateway, CHAT, b'{"not": "json')
    lines = [JsonFormatter().format(record) for record in caplog.records if record.message == "request"]
    served, refused = (orjson.loads(line) for line in lines)
    assert (served["status"], served["model"], served["replica"], served["num_output_tokens"]) == (200, "m", "r1", 5)
    assert (refused["status"], refused["code"]) == (400, "invalid_json")
    assert "one two three" not in "".join(lines)
