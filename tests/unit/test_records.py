from __future__ import annotations

import random
from dataclasses import replace

import orjson
import pyarrow.parquet as pq
import pytest

from serving.core.state import Task
from workbench.loadgen import ClientError, FailureKind, RequestRecord, Slo, TokenSource, records, summarize
from workbench.loadgen.answers import RawAnswer, read_answer
from workbench.loadgen.records import read_parquet

ASKED = RequestRecord("r-0", 0, Task.GENERATE, 8, 4, intended_at_s=0.0, sent_at_s=0.0)
LOOSE = Slo(ttft_s=10.0, tpot_s=10.0)


def event(payload: object) -> bytes:
    return b"data: " + (payload if isinstance(payload, bytes) else orjson.dumps(payload)) + b"\n\n"


def text(word: str = " a", *, ids: int | None = None, total: int | None = None, finish: str | None = None) -> bytes:
    choice: dict[str, object] = {"index": 0, "text": word, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = list(range(ids))
    body: dict[str, object] = {"choices": [choice]}
    if total is not None:
        body["usage"] = {"prompt_tokens": 8, "completion_tokens": total}
    return event(body)


def usage(total: int, prompt: int = 8) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": total}})


def delta(finish: str | None = None, **fields: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


DONE = event(b"[DONE]")


def read(*chunks: tuple[float, bytes], asked: RequestRecord = ASKED, is_exact: bool = True, **raw) -> RequestRecord:
    answer = RawAnswer(sent_at_s=100.0, ended_at_s=109.0, head_at_s=100.5, status=200, chunks=list(chunks))
    return read_answer(replace(answer, **raw), asked, start_s=100.0, is_exact=is_exact)


class TestTokens:
    def test_ids_come_first_and_late_events_move_nothing(self):
        stamps = [(101.0, text(ids=1)), (102.0, text(ids=2)), (103.0, text("", ids=1, finish="length"))]
        record = read(*stamps, (103.5, usage(4)), (104.0, DONE))
        assert record.token_source is TokenSource.TOKEN_IDS
        assert (record.chunk_at_s, record.chunk_tokens) == ((1.0, 2.0, 3.0), (1, 2, 1))
        assert (record.ttft_s, record.e2e_s, record.stream_end_at_s) == (1.0, 3.0, 4.0)
        assert record.itl_s() == [0.5, 0.5, 1.0]
        assert record.tpot_s == pytest.approx(2.0 / 3)
        assert record.ok

    def test_continuous_usage_counts_each_event(self):
        record = read((101.0, text(total=1)), (102.0, text(total=4, finish="length")), (103.0, usage(4)), (103.0, DONE))
        assert record.token_source is TokenSource.CONTINUOUS_USAGE
        assert record.chunk_tokens == (1, 3)
        assert record.ok

    def test_final_usage_is_spread_over_what_carried_text(self):
        stamps = [(101.0 + n, text(finish="length" if n == 2 else None)) for n in range(3)]
        record = read(*stamps, (104.0, usage(4)))
        assert record.token_source is TokenSource.FINAL_USAGE
        assert record.chunk_tokens == (2, 1, 1)
        assert record.ok

    def test_usage_in_the_last_text_alone_is_not_continuous(self):
        record = read((101.0, text()), (102.0, text(total=4, finish="length")))
        assert record.token_source is TokenSource.FINAL_USAGE
        assert record.chunk_tokens == (2, 2)

    def test_four_tokens_a_chunk_every_40_ms_are_10_ms_a_token(self):
        stamps = [(101 + 0.04 * n, text(ids=4, finish="length" if n == 4 else None)) for n in range(5)]
        record = read(*stamps, (102.0, usage(20)), asked=replace(ASKED, num_output_tokens_asked=20))
        assert record.tpot_s == pytest.approx(0.010)
        assert record.itl_s() == pytest.approx([0.010] * 16)

    def test_a_role_is_no_token_and_reasoning_is_one_but_no_content(self):
        stamps = [
            (101.0, delta(role="assistant", content="")),
            (102.0, delta(reasoning="hm")),
            (103.0, delta(content="a", finish="length")),
        ]
        record = read(*stamps, (104.0, usage(2)), asked=replace(ASKED, num_output_tokens_asked=2))
        assert (record.ttft_s, record.ttfc_s, record.num_output_tokens) == (2.0, 3.0, 2)
        assert record.ok

    def test_an_event_has_the_time_of_the_bytes_that_complete_it(self):
        whole = text(ids=4, finish="length")
        assert read((101.0, whole[:20]), (102.0, whole[20:])).ttft_s == 2.0


class TestFailures:
    @pytest.mark.parametrize(
        ("chunks", "kind"),
        [
            ([event({"error": {"code": 503, "message": "full"}})], FailureKind.ERROR_EVENT),
            ([text(ids=4, finish="length"), event({"error": {"code": 500}}), DONE], FailureKind.ERROR_EVENT),
            ([DONE], FailureKind.NO_TOKEN),
            ([], FailureKind.NO_TOKEN),
            ([delta(role="assistant", content=""), usage(0), DONE], FailureKind.NO_TOKEN),
            ([text(ids=1), text(ids=1)], FailureKind.TRUNCATED),
            ([text(finish="length"), DONE], FailureKind.UNCOUNTED),
            ([text(ids=3, finish="length"), usage(4), DONE], FailureKind.MISCOUNTED),
            ([text(ids=4, finish="length"), usage(4, prompt=9), DONE], FailureKind.MISCOUNTED),
            ([text(ids=2, finish="stop"), usage(2), DONE], FailureKind.WRONG_LENGTH),
            ([event(b"{nonsense")], FailureKind.MALFORMED),
            ([event(b'["a list"]')], FailureKind.MALFORMED),
        ],
    )
    def test_of_a_stream_under_status_200(self, chunks, kind):
        record = read(*((101.0 + n, chunk) for n, chunk in enumerate(chunks)))
        assert record.failure is kind
        assert record.failure_detail

    def test_a_model_may_stop_early_when_nobody_forbade_it_but_not_late(self):
        assert read((101.0, text(ids=2, finish="stop")), (101.0, usage(2)), is_exact=False).ok
        late = read((101.0, text(ids=5, finish="stop")), (101.0, usage(5)), is_exact=False)
        assert late.failure is FailureKind.WRONG_LENGTH

    def test_what_the_transport_saw_wins_and_keeps_what_came(self):
        record = read((101.0, text(ids=2)), failure=FailureKind.LOST, detail="EOF")
        assert (record.failure, record.num_output_tokens, record.ttft_s) == (FailureKind.LOST, 2, 1.0)

    def test_a_status_is_told_with_the_beginning_of_its_body(self):
        record = read((101.0, b'{"error": "full"}'), status=503)
        assert (record.failure, record.http_status) == (FailureKind.HTTP_STATUS, 503)
        assert "full" in record.failure_detail

    def test_no_connection(self):
        record = read(status=None, head_at_s=None, failure=FailureKind.CONNECT, detail="refused")
        assert (record.failure, record.failure_detail, record.ttft_s) == (FailureKind.CONNECT, "refused", None)

    @pytest.mark.parametrize(
        ("body", "kind"),
        [
            ({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 8}}, None),
            ({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 7}}, FailureKind.MISCOUNTED),
            ({"data": [{"embedding": []}]}, FailureKind.NO_TOKEN),
            ({"data": []}, FailureKind.NO_TOKEN),
            ({"error": "?"}, FailureKind.MALFORMED),
        ],
    )
    def test_of_an_embedding(self, body, kind):
        record = read((103.0, orjson.dumps(body)), asked=replace(ASKED, task=Task.EMBED, num_output_tokens_asked=0))
        assert record.failure is kind
        assert record.e2e_s == (3.0 if kind is None else record.e2e_s)


def closed_loop(num_waves: int = 4, concurrency: int = 8, *, ttft_s=0.1, itl_s=0.01, num_tokens=50, jitter_s=1e-5):
    """Records of a closed loop in which each request takes the same time."""
    rng = random.Random(1)
    delays_s = [rng.random() * jitter_s for _ in range(concurrency)]
    took_s = ttft_s + itl_s * (num_tokens - 1)
    made = []
    for index in range(num_waves * concurrency):
        sent_s = (index // concurrency) * took_s + delays_s[index % concurrency]
        stamps = tuple(sent_s + ttft_s + itl_s * n for n in range(num_tokens))
        made.append(
            RequestRecord(
                f"r-{index}",
                index,
                Task.GENERATE,
                64,
                num_tokens,
                sent_s,
                sent_s,
                head_at_s=sent_s,
                first_content_at_s=stamps[0],
                stream_end_at_s=stamps[-1] + 0.5,
                chunk_at_s=stamps,
                chunk_tokens=(1,) * num_tokens,
                num_output_tokens=num_tokens,
                usage_prompt_tokens=64,
                num_cached_tokens=0,
                token_source=TokenSource.TOKEN_IDS,
                finish_reason="length",
                http_status=200,
            )
        )
    return made


class TestSummary:
    def test_rates_of_a_known_load(self):
        summary = summarize(closed_loop(), slo=Slo(0.2, 0.02), num_units=2, num_warm_up=8)
        took_s = 0.1 + 0.01 * 49
        assert summary.invalid is None
        assert summary.metrics["output_tokens_per_s_per_gpu"] == pytest.approx(8 * 50 / took_s / 2, rel=1e-3)
        assert summary.metrics["prompt_tokens_per_s_per_gpu"] == pytest.approx(8 * 64 / took_s / 2, rel=1e-3)
        assert summary.metrics["request_rps"] == pytest.approx(8 / took_s, rel=1e-3)
        assert summary.metrics["goodput_rps"] == pytest.approx(8 / took_s, rel=1e-3)
        assert summary.metrics["ttft_s/p50"] == pytest.approx(0.1)
        assert summary.metrics["tpot_s/p99"] == pytest.approx(0.01)
        assert summary.metrics["itl_s/p99"] == pytest.approx(0.01)
        assert summary.metrics["cached_prompt_frac"] == 0.0
        assert summary.window.length_s == pytest.approx(3 * took_s, rel=1e-3)
        assert summary.window.num_output_tokens == pytest.approx(3 * 8 * 50, rel=1e-3)
        for name, (low, high) in summary.intervals.items():
            assert low <= summary.metrics[name] <= high, name

    def test_a_prefill_cell_of_one_token_counts_whole_waves(self):
        summary = summarize(closed_loop(num_tokens=1), slo=LOOSE, num_units=1, num_warm_up=8)
        assert summary.metrics["prompt_tokens_per_s_per_gpu"] == pytest.approx(8 * 64 / 0.1, rel=1e-3)
        assert "tpot_s/p50" not in summary.metrics

    def test_percentiles_that_the_sample_cannot_carry_are_marked(self):
        summary = summarize(closed_loop(), slo=LOOSE, num_units=1, num_warm_up=8)
        assert "ttft_s/p99" in summary.weak
        assert "ttft_s/p99" in summary.metrics
        assert "ttft_s/p99" not in summary.intervals
        assert "ttft_s/p50" not in summary.weak
        assert "itl_s/p99" not in summary.weak

    def test_good_is_judged_request_by_request(self):
        made = closed_loop()
        slow = [replace(r, chunk_at_s=tuple(t + 5 for t in r.chunk_at_s)) if r.index == 20 else r for r in made]
        summary = summarize(slow, slo=Slo(1.0, 0.02), num_units=1, num_warm_up=8)
        assert summary.metrics["slo_good_frac"] == pytest.approx(23 / 24)
        assert summary.metrics["goodput_rps"] < summary.metrics["request_rps"]
        none = summarize(made, slo=Slo(1.0, 0.001), num_units=1, num_warm_up=8)
        assert none.metrics["goodput_rps"] == 0.0

    def test_too_many_failures_leave_no_percentile(self):
        made = [
            replace(r, failure=FailureKind.ERROR_EVENT, failure_detail="x") if r.index % 3 else r for r in closed_loop()
        ]
        summary = summarize(made, slo=LOOSE, num_units=1, num_warm_up=8)
        assert "21 of 32 requests failed (error_event 21)" in summary.invalid
        assert set(summary.metrics) == {"failed_frac"}
        assert summary.failures == {FailureKind.ERROR_EVENT: 21}

    def test_few_failures_are_counted_and_left_out(self):
        made = [replace(r, failure=FailureKind.LOST) if r.index == 30 else r for r in closed_loop()]
        summary = summarize(made, slo=LOOSE, num_units=1, num_warm_up=8)
        assert summary.invalid is None
        assert summary.num_failed == 1
        assert summary.metrics["slo_good_frac"] == pytest.approx(23 / 24)
        assert summary.window.num_requests < 24

    @pytest.mark.parametrize("made", [[], closed_loop(num_waves=1)])
    def test_nothing_after_the_warm_up_is_invalid(self, made):
        summary = summarize(made, slo=LOOSE, num_units=1, num_warm_up=8)
        assert "warm-up" in summary.invalid
        assert summary.intervals == {}

    def test_a_client_that_fell_behind_is_invalid(self):
        error = ClientError(0.2, 0.001, invalid="the client fell behind")
        summary = summarize(closed_loop(), slo=LOOSE, num_units=1, num_warm_up=8, client_error=error)
        assert summary.invalid == "the client fell behind"

    def test_embeddings_have_requests_and_prompt_tokens_a_second(self):
        made = [
            RequestRecord(
                f"r-{n}", n, Task.EMBED, 32, 0, 0.1 * n, 0.1 * n, stream_end_at_s=0.1 * (n + 1), http_status=200
            )
            for n in range(20)
        ]
        summary = summarize(made, slo=Slo(0.2, 1.0), num_units=1, num_warm_up=1)
        assert summary.metrics["request_rps"] == pytest.approx(10.0)
        assert summary.metrics["prompt_tokens_per_s_per_gpu"] == pytest.approx(320.0)
        assert summary.metrics["slo_good_frac"] == 1.0
        assert summary.metrics["e2e_s/p50"] == pytest.approx(0.1)
        assert "output_tokens_per_s_per_gpu" not in summary.metrics
        assert "ttft_s/p50" not in summary.metrics

    def test_same_records_same_figures(self):
        made = closed_loop()
        first, again = (summarize(m, slo=LOOSE, num_units=1, num_warm_up=8) for m in (made, made[::-1]))
        assert first == again


class TestParquet:
    def test_there_and_back(self, tmp_path):
        failed = replace(ASKED, index=1, failure=FailureKind.CONNECT, failure_detail="refused")
        embedded = replace(ASKED, index=2, task=Task.EMBED, stream_end_at_s=1.0)
        made = [*closed_loop(1, 2), failed, embedded]
        path = tmp_path / "requests.parquet"
        records.write_parquet(made, path)
        assert records.read_parquet(path) == made
        assert [file.name for file in tmp_path.iterdir()] == ["requests.parquet"]

    def test_records_of_the_schema_before_are_read(self, tmp_path):
        path = tmp_path / "old.parquet"
        old = records.to_table([ASKED]).drop_columns(["adapter", "tier", "session_id", "turn", "is_prompt_estimated"])
        pq.write_table(old.replace_schema_metadata({"records_schema": "1"}), path)
        assert read_parquet(path) == [ASKED]

    def test_sessions_tiers_and_adapters_are_kept(self, tmp_path):
        record = replace(ASKED, adapter="a", tier="flex", session_id="s", turn=2, is_prompt_estimated=True)
        records.write_parquet([record], tmp_path / "new.parquet")
        assert read_parquet(tmp_path / "new.parquet") == [record]

    def test_another_schema_is_refused_by_name(self, tmp_path):
        path = tmp_path / "other.parquet"
        pq.write_table(records.to_table([ASKED]).replace_schema_metadata({"records_schema": "99"}), path)
        with pytest.raises(ValueError, match="schema 99"):
            records.read_parquet(path)
