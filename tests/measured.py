"""A fake engine as the replica under test, and words to send it."""

from __future__ import annotations

import itertools
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from serving.core.state import Task
from serving.engine.fake import FakeSettings
from workbench.loadgen import Slo, Vocabulary
from workbench.sweeps.cells import MeasuredReplica, Shape
from workbench.sweeps.plan import SweepMode, SweepPlan

# Half a minute of a CPU core in a second: steps are 2 ms, a prompt token takes 0.1 ms.
FAST = FakeSettings(model="fake-model", ttft_ms=4.0, prefill_ms_per_token=0.1, itl_ms=2.0, block_size=16)
SLO = Slo(ttft_s=1.0, tpot_s=0.1)
PLAN = SweepPlan(
    SweepMode.SHORT, Task.GENERATE, (Shape(48, 16),), (1, 4), SLO, num_waves=5, min_requests=8, prefill_requests=20
)


def make_vocabulary(folder: Path) -> Vocabulary:
    """A vocabulary of a thousand three-letter words."""
    words = ["\u2581" + "".join(letters) for letters in itertools.product("abcdefghij", repeat=3)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Vocabulary.load(folder)


def make_replica(url: str, model: str = "fake-model", gateway_url: str | None = None) -> MeasuredReplica:
    """The fake engine as a replica of one CPU core."""
    return MeasuredReplica(
        replica_id=f"{model}-cpu-0",
        url=url,
        request_model="fake-model",
        model=model,
        version="1",
        task=Task.GENERATE,
        hardware_class="cpu",
        num_units=1,
        engine_fingerprint="engine-1",
        hardware_fingerprint="hardware-1",
        engine_covers={"engine": "fake", "flags": {"block_size": 16}},
        hardware_covers={"device": "none"},
        gateway_url=gateway_url,
    )
