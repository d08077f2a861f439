"""The pipe to a real store: order, scripts, loss and return, a store that hangs, passwords and databases."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from serving.store.connection import StoreUnavailable
from serving.store.pipelined import Script, StorePipe
from serving.store.resp import Reply, StoreRefused, encode
from serving.store.server import StoreServer, find_server
from workbench.stack.ports import free_port

ADD = Script("return redis.call('INCRBY', KEYS[1], ARGV[1])")


@pytest_asyncio.fixture
async def pipe(server: StoreServer) -> AsyncIterator[StorePipe]:
    pipe = StorePipe(server.url)
    yield pipe
    await pipe.close()


async def until_up(pipe: StorePipe) -> None:
    async with asyncio.timeout(5):
        while True:
            if pipe.is_up:
                return
            await asyncio.sleep(0.01)


async def test_calls_before_the_first_connection_wait_for_it(pipe: StorePipe) -> None:
    assert not pipe.is_up
    replies = await asyncio.gather(*(pipe.call("INCR", "n") for _ in range(50)))
    assert replies == list(range(1, 51))
    assert pipe.is_up


async def test_each_gets_its_own_reply(pipe: StorePipe) -> None:
    async def one(number: int) -> None:
        assert await pipe.call("ECHO", number) == b"%d" % number
        await asyncio.sleep(0)
        assert await pipe.call("ECHO", "x" * number * 700) == b"x" * number * 700

    await asyncio.gather(*(one(number) for number in range(200)))


async def test_an_error_is_of_its_call_alone(pipe: StorePipe) -> None:
    await pipe.call("SET", "k", "text")
    bad, good = await asyncio.gather(pipe.call("INCR", "k"), pipe.call("GET", "k"), return_exceptions=True)
    assert isinstance(bad, StoreRefused)
    assert bad.reason == "ERR"
    assert good == b"text"


async def test_a_script_is_loaded_when_it_is_missed(pipe: StorePipe) -> None:
    assert await pipe.script(ADD, ["n"], [5]) == 5
    await pipe.call("SCRIPT", "FLUSH")
    assert await asyncio.gather(*(pipe.script(ADD, ["n"], [1]) for _ in range(5))) == [6, 7, 8, 9, 10]


async def test_a_new_connection_brings_its_scripts_along(server: StoreServer) -> None:
    pipe = StorePipe(server.url, scripts=[ADD])
    assert await pipe.send(ADD.command(["n"], [2])) == 2
    await pipe.close()


async def test_a_call_that_is_cancelled_does_not_shift_the_others(pipe: StorePipe) -> None:
    await pipe.call("PING")
    tasks = [asyncio.create_task(pipe.call("ECHO", number)) for number in range(10)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(replies[3], asyncio.CancelledError)
    assert [reply for at, reply in enumerate(replies) if at != 3] == [b"%d" % at for at in range(10) if at != 3]


async def test_posted_calls_are_done_in_order_and_tell_how_they_went(pipe: StorePipe) -> None:
    told: list[Reply | StoreUnavailable] = []
    for _ in range(3):
        pipe.post(encode(("INCR", "n")), told.append)
    assert await pipe.call("GET", "n") == b"3"
    assert told == [1, 2, 3]


async def test_a_lost_store_is_said_at_once_and_comes_back(server: StoreServer, pipe: StorePipe) -> None:
    await pipe.call("SET", "k", 1)
    await server.stop()
    told: list[Reply | StoreUnavailable] = []
    with pytest.raises(StoreUnavailable):
        await pipe.call("GET", "k")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(100):
        with pytest.raises(StoreUnavailable):
            await pipe.call("GET", "k")
        pipe.post(encode(("GET", "k")), told.append)
    assert loop.time() - began_s < 0.4
    assert all(isinstance(reply, StoreUnavailable) for reply in told)
    assert len(told) == 100
    await server.start()
    await until_up(pipe)
    assert await pipe.call("GET", "k") == b"1"


async def test_a_store_that_hangs_is_given_up_and_taken_back(server: StoreServer) -> None:
    pipe = StorePipe(server.url, timeout_s=0.2)
    await pipe.call("PING")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(2):
            with pytest.raises(StoreUnavailable, match=r"within 0\.2 s"):
                await pipe.call("PING")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until_up(pipe)
    assert await pipe.call("PING") == b"PONG"
    await pipe.close()


async def test_a_closed_pipe_fails_what_waits_and_what_comes(server: StoreServer) -> None:
    pipe = StorePipe(server.url)
    await pipe.call("PING")
    waiting = pipe.send(encode(("BLPOP", "never", 5)))
    await pipe.close()
    with pytest.raises(StoreUnavailable):
        await waiting
    with pytest.raises(StoreUnavailable):
        await pipe.call("PING")


async def test_an_address_where_nothing_listens(tmp_path: Path) -> None:
    pipe = StorePipe(f"unix://{tmp_path}/none.sock")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await pipe.call("PING")
    await pipe.close()
    with pytest.raises(ValueError, match="scheme"):
        StorePipe("http://localhost")


async def test_password_and_database_of_the_url(tmp_path: Path) -> None:
    port = free_port()
    options = ("--port", str(port), "--save", "", "--requirepass", "secret-word", "--dir", str(tmp_path))
    process = await asyncio.create_subprocess_exec(str(find_server()), *options, stdout=asyncio.subprocess.DEVNULL)
    pipes = [StorePipe(f"redis://:{word}@127.0.0.1:{port}/3") for word in ("secret-word", "wrong-word")]
    try:
        for pipe in pipes:
            pipe.post(encode(("PING",)), lambda reply: None)
        await until_up(pipes[0])
        await pipes[0].call("SET", "k", 1)
        assert b"db3:keys=1" in await pipes[0].call("INFO", "keyspace")
        with pytest.raises(StoreUnavailable) as refused:
            await pipes[1].call("PING")
        assert "word" not in refused.value.message
        assert not pipes[1].is_up
    finally:
        for pipe in pipes:
            await pipe.close()
        process.kill()
        await process.wait()
