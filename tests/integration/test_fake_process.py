"""The fake engine as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from pathlib import Path

import orjson

from serving.engine.client import EngineClient

COMMAND = [sys.executable, "-m", "serving.engine.fake"]


async def run_to_end(*options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(*COMMAND, *options, stderr=asyncio.subprocess.PIPE)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, stderr.decode()


async def test_it_serves_logs_and_ends_on_sigterm(tmp_path: Path) -> None:
    port_file, log = tmp_path / "port", tmp_path / "log.jsonl"
    options = ["--model", "m", "--ttft-ms", "1", "--itl-ms", "1", "--port-file", str(port_file), "--log", str(log)]
    process = await asyncio.create_subprocess_exec(*COMMAND, *options)
    try:
        deadline_s = time.monotonic() + 20
        while not port_file.exists():
            assert time.monotonic() < deadline_s
            assert process.returncode is None
            await asyncio.sleep(0.05)
        async with EngineClient(f"http://127.0.0.1:{port_file.read_text()}") as client:
            body = orjson.dumps({"model": "m", "prompt": "a b", "max_tokens": 3, "stream": True})
            response = await client.request("POST", "/v1/completions", body=body, timeout_s=10)
            received = [received_at_s async for received_at_s, _ in response.chunks()]
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    (entry,) = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    # Both processes read one clock, so that the engine's stamps lie between the client's.
    stamps = [response.sent_at_s, entry["received_at_s"], *(write["at_s"] for write in entry["writes"]), received[-1]]
    assert stamps == sorted(stamps)
    assert entry["num_output_tokens"] == 3


async def test_wrong_options_and_a_taken_port_are_told() -> None:
    code, message = await run_to_end("--itl-ms", "-1")
    assert (code, "itl_ms" in message) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, message = await run_to_end("--port", str(port))
    assert (code, f"cannot listen on 127.0.0.1:{port}" in message) == (1, True)
