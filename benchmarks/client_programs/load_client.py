"""Our load generator as a program of its own: `load_client.py URL MODEL STREAMS REQUESTS PROMPT OUTPUT SEED FILE`."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from workbench.loadgen import ClosedLoop, Prompt, Target, run_load


def prompts(num_words: int, num_output_tokens: int, seed: int) -> Iterator[Prompt]:
    """Chats of about so many tokens, no two alike."""
    rng = random.Random(seed)
    while True:
        text = " ".join(f"w{rng.randrange(10_000)}" for _ in range(num_words))
        yield Prompt(num_words, num_output_tokens, messages=({"role": "user", "content": text},), is_estimated=True)


async def main() -> None:
    """Runs the load and writes its figures, with the CPU time of all of it: calibration, load, parsing."""
    url, model, *numbers, file = sys.argv[1:]
    streams, num_requests, num_words, num_output_tokens, seed = map(int, numbers)
    began_s = time.process_time()
    result = await run_load(
        Target(url, model),
        prompts(num_words, num_output_tokens, seed),
        ClosedLoop(streams),
        num_requests=num_requests,
        max_duration_s=120.0,
        cache_salt=f"{seed}",
        client_processes=1,
    )
    cpu_s, good = time.process_time() - began_s, [record for record in result.records if record.ok]
    length_s = max(r.end_at_s or 0.0 for r in good) - min(r.sent_at_s for r in good)
    num_tokens = sum(record.num_output_tokens for record in good)
    figures = {
        "num_good": len(good),
        "output_tokens_per_s": num_tokens / length_s,
        "ttft_ms": 1e3 * statistics.median(record.ttft_s or 0.0 for record in good),
        "tpot_ms": 1e3 * statistics.median(record.tpot_s or 0.0 for record in good),
        "cpu_us_per_token": 1e6 * cpu_s / num_tokens,
    }
    await asyncio.to_thread(Path(file).write_text, json.dumps(figures))


if __name__ == "__main__":
    uvloop.run(main())
