"""`workbench.bench` and `workbench bench --url` at a fake engine, whose own counters are the other side."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import workbench
from serving.core.errors import NotFound, Unavailable, UpstreamError
from serving.engine.client import EngineClient
from serving.engine.fake import FakeEngine, FakeSettings
from tests.measured import make_vocabulary
from workbench.absent import Absent
from workbench.benchmark.result import BenchResult
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.comparison.cells import NotComparable
from workbench.loadgen import FailureKind, WorkloadError
from workbench.measurement.engine_window import EngineCount

QUICK = {"workload": "completion:prompt=24,output=8", "max_duration_s": 20.0}
# Requests after which a run is more than its warm-up.
ENOUGH = 100


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("weights")
    make_vocabulary(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _a_late_client_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a run of a late client is refused is tested elsewhere; here a busy machine must not decide."""
    monkeypatch.setattr("workbench.loadgen.client_error.MAX_SEND_LAG_S", 60.0)
    monkeypatch.setattr("workbench.loadgen.client_error.MAX_LOOP_LAG_S", 60.0)


async def bench(url: str, tokenizer: str | None, **more: object) -> BenchResult:
    return await workbench.abench("m", url=url, tokenizer=tokenizer, **(QUICK | more))  # type: ignore[arg-type]


async def test_an_endpoint_is_measured_without_a_configuration_and_shows_itself(
    engine: FakeEngine, tokenizer: str, tmp_path: Path
):
    result = await bench(engine.url + "/v1", tokenizer, num_requests=80, usd_per_hour=3.6, num_units=2)
    assert result.invalid is None
    assert isinstance(result.counted, EngineCount) and result.counted.gap is None
    assert result.counted.num_output_tokens == 80 * 8
    assert all(log.body["ignore_eos"] for log in engine.log.ended)  # what has vLLM's counters takes its extras
    metrics, intervals = result.metrics, result.intervals
    assert all(math.isfinite(value) for value in (*metrics.values(), *(x for pair in intervals.values() for x in pair)))
    rate = metrics["tokens_per_s_per_gpu"]
    assert metrics["usd_per_million_tokens"] == pytest.approx(3.6 / 3600 / (2 * rate) * 1e6)
    low, high = intervals["usd_per_million_tokens"]
    assert low <= metrics["usd_per_million_tokens"] <= high
    assert metrics["num_unsent"] == 0.0 and "send_lag_s/p99" in metrics
    assert metrics["output_tokens_per_s_per_user/p10"] <= metrics["output_tokens_per_s_per_user/p50"]
    assert "goodput_rps" in repr(result) and "engine counters: 1920 prompt" in repr(result)
    assert "<table>" in result._repr_html_() and "<svg" in result._repr_html_()
    frame = result.frame()
    assert len(frame) == 80 and frame["ok"].all() and frame["ttft_s"].notna().all()
    assert len(result.figure().data) == 2
    assert [trace.name for trace in result.figure("latency").data] == ["TTFT", "TPOT", "E2E"]
    assert workbench.last_bench() is result
    result.page(page := tmp_path / "page.html")
    assert "closed:concurrency=4" in page.read_text("utf-8")[:4000]
    json.dumps(result.to_json(), allow_nan=False)


async def test_a_server_without_vllms_counters_gets_no_extras_and_that_is_said(
    engine: FakeEngine, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    async def no_counters(*_: object) -> None:
        raise UpstreamError("GET /metrics answered 404")

    monkeypatch.setattr("workbench.measurement.engine_window.scrape", no_counters)
    result = await bench(engine.url, tokenizer, load="poisson:rate=100", num_requests=40)
    assert result.invalid is None, result
    assert isinstance(result.counted, Absent)
    assert "engine counters: no engine" in repr(result)
    assert not any("ignore_eos" in log.body or "cache_salt" in log.body for log in engine.log.ended)
    assert "queue_growth_rps" not in result.metrics or result.found.is_saturated is not None


async def test_somebody_else_at_the_engine_fails_the_run(engine: FakeEngine, tokenizer: str):
    async with EngineClient(engine.url) as other:
        body = {"model": "m", "prompt": [1] * 50, "max_tokens": 50, "ignore_eos": True}
        running = asyncio.create_task(bench(engine.url, tokenizer, num_requests=200))
        await asyncio.sleep(0.3)
        await other.post_json("/v1/completions", body)
        result = await running
    assert result.invalid is not None and "somebody else" in result.invalid


async def test_a_cancelled_run_is_kept_and_the_cancellation_goes_on(engine: FakeEngine, tokenizer: str):
    running = asyncio.create_task(bench(engine.url, tokenizer, load="poisson:rate=100", max_duration_s=60.0))
    await engine.wait_until(lambda engine: len(engine.log.ended) >= ENOUGH, timeout_s=30.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    kept = workbench.last_bench()
    assert kept is not None and kept.is_interrupted
    assert 20 < kept.summary.num_requests < 2000
    assert kept.notes[0].startswith("interrupted: ")
    assert FailureKind.CUT_OFF not in kept.summary.failures and kept.invalid is None


@contextmanager
def engine_in_a_thread() -> Iterator[FakeEngine]:
    started, stop = threading.Event(), threading.Event()
    engines: list[FakeEngine] = []

    async def serve() -> None:
        async with FakeEngine(FakeSettings(model="m", ttft_ms=1.0, itl_ms=1.0)) as engine:
            engines.append(engine)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(10)
    try:
        yield engines[0]
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("way", ["python", "command line"])
def test_ctrl_c_returns_what_was_measured(way: str, tokenizer: str, capsys: pytest.CaptureFixture[str]):
    def press_once_served(engine: FakeEngine) -> None:
        give_up_s = time.monotonic() + 30.0
        while len(engine.log.ended) < ENOUGH and time.monotonic() < give_up_s:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    with engine_in_a_thread() as engine:
        url = engine.url
        presser = threading.Thread(target=press_once_served, args=(engine,))
        presser.start()
        if way == "python":
            told = workbench.bench(
                "m", url=url, tokenizer=tokenizer, load="poisson:rate=80", max_duration_s=60
            ).to_json()
        else:
            words = [
                "--url",
                url,
                "--model",
                "m",
                "--tokenizer",
                tokenizer,
                "--rate",
                "80",
                "--seconds",
                "60",
                "--json",
            ]
            assert run_app(["bench", *words]) == Exit.INTERRUPTED
            told = json.loads(capsys.readouterr().out)
        presser.join()
    assert told["is_interrupted"]
    assert told["num_requests"] > 10 and told["metrics"]["request_rps"] > 0


async def test_what_cannot_be_measured_is_named(engine: FakeEngine, tokenizer: str, tmp_path: Path):
    with pytest.raises(NotFound, match="serves no model 'other'; it serves m"):
        await workbench.abench("other", url=engine.url)
    with pytest.raises(Unavailable, match="nothing answers at"):
        await bench("http://127.0.0.1:9", tokenizer)
    with pytest.raises(ValueError, match="is no address"):
        await bench("127.0.0.1:8000", tokenizer)
    with pytest.raises(WorkloadError, match="--tokenizer FOLDER"):
        await bench(engine.url, None)
    rows = tmp_path / "mine.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"word {n}", "max_tokens": 6}) for n in range(20)))
    result = await bench(engine.url, "none", workload=f"file:{rows}")
    assert result.summary.num_requests == 20 and result.invalid is None, result


async def test_the_command_measures_an_endpoint_by_load_and_workload(
    engine: FakeEngine, tokenizer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BOX_KEY", "secret")
    words = ["bench", "--url", engine.url, "--model", "m", "--tokenizer", tokenizer, "--api-key-env", "BOX_KEY"]
    words += ["--load", "constant:rate=100", "--workload", "sessions:turns=2,prompt=24,output=4"]
    words += ["--requests", "100", "--seconds", "60"]  # no turn comes too late, however slow the machine
    assert await asyncio.to_thread(run_app, [*words, "--json"]) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["load"], told["num_requests"], told["invalid"]) == ("constant:rate=100", 100, None)
    assert told["engine_counters"]["gap"] is None
    assert await asyncio.to_thread(run_app, words) == Exit.OK
    shown = capsys.readouterr().out
    assert "send_lag_s/p99" in shown and "engine counters: " in shown and "energy: " in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "3"], "name a model"),
        (["a", "--model", "b"], "two models"),
        (["m", "--url", "http://h", "--load", "closed:concurrency=1", "--rate", "1"], "short forms"),
        (["m", "--url", "http://h", "--workload", "embed:prompt=4", "--prompt-tokens", "1"], "short forms"),
        (["m", "--url", "http://h", "--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE is not set"),
        (["m", "--url", "http://h", "--load", "tide:rate=1"], "tide"),
    ],
)
def test_a_wrong_command_line_says_what_would_be_right(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run_app(["bench", *words]) == Exit.USAGE
    assert message in capsys.readouterr().err


async def test_benchmarks_in_turns_are_compared(engine: FakeEngine, tokenizer: str):
    one = await bench(engine.url, tokenizer, num_requests=48)

    def run(number: int, factor: float) -> BenchResult:
        metrics = {name: value * factor for name, value in one.summary.metrics.items()}
        times = {"started_at_s": 100.0 * number, "ended_at_s": 100.0 * number + 50.0}
        return replace(one, summary=replace(one.summary, metrics=metrics), **times)

    a = [run(2 * number, 1.0 + number / 1000) for number in range(8)]
    b = [run(2 * number + 1, 1.1 + number / 900) for number in range(8)]
    compared = workbench.compare(a, b, metrics=["output_tokens_per_s_per_gpu"])
    assert list(compared.frame()["B is"]) == ["better"]
    assert "8 pairs, better" in repr(compared)
    assert "no verdict" in repr(workbench.compare(a[0], b[0]))
    with pytest.raises(NotComparable, match="not asked for the same"):
        workbench.compare(a, [replace(one, load="closed:concurrency=9")])
