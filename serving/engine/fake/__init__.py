"""A vLLM look-alike on HTTP without a model, whose own log of writes is the truth in tests and client checks.

    http.py        one connection: requests in, responses out, nothing else
    server.py      FakeEngine: the listening socket, the routes
    generation.py  one request's life: waiting, prefill, a timer a chunk, end or abort
    scheduler.py   who runs and who waits; KV cache, prefix cache, counters
    language.py    words as tokens; the text that "the model" says; embeddings
    openai.py      bodies and chunks in vLLM's shapes
    settings.py    what can be set: the engine's speed and size, and its faults
    write_log.py   every write of every request with its time

Chunks go out at absolute deadlines, so a late one delays no other, and `TokenWrite.at_s` is time.perf_counter()
right before the socket write. On Linux that clock is common to all processes, so a client's stamps compare with it.
Not uvloop: it collects writes until the loop's turn ends, by which the stamps would be early.
"""

from serving.engine.fake.server import FakeEngine
from serving.engine.fake.settings import FakeSettings, Faults, ServerFaults
from serving.engine.fake.write_log import RequestLog, Write, WriteKind

__all__ = ["FakeEngine", "FakeSettings", "Faults", "ServerFaults", "RequestLog", "Write", "WriteKind"]
