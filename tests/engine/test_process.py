"""The engine process: what its client sees when it is built, asked, stopped, broken, killed or orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onechip.config import EngineConfig
from onechip.engine.client import RemoteEngine
from onechip.errors import EngineDead, StartupError
from onechip.request import Event, Request, SamplingParams

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, str(Path(__file__).parent.parent / "fake_engine_process.py"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def request(name: str, max_tokens: int = 5) -> Request:
    return Request(name, (10, 11), SamplingParams(max_tokens=max_tokens, seed=1))


async def started(model: str) -> RemoteEngine:
    return await RemoteEngine.start(model, EngineConfig(), COMMAND)


async def collect(engine: RemoteEngine, wanted: Request) -> list[Event]:
    return [event async for event in engine.generate(wanted)]


async def test_a_request_crosses_the_process_and_ends_once():
    engine = await started("fake")
    with pytest.raises(EngineDead):
        engine.open((request("early"),))
    info = await engine.ready()
    assert info.vocab_size == 600
    events = await collect(engine, request("a"))
    assert [i for e in events for i in e.token_ids] == [12, 13, 14, 15, 16]
    assert [e.finish for e in events if e.finish] == ["length"]
    assert await engine.close() == 0
    assert not engine.alive


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [("missing", StartupError, "no such file"), ("bug", EngineDead, "a bug in the builder")],
)
async def test_a_build_that_fails_says_why(model: str, error: type[Exception], text: str):
    engine = await started(model)
    with pytest.raises(error, match=text):
        await engine.ready()
    status = await engine.close()
    assert status is not None and status > 0


async def test_a_broken_engine_ends_every_request_and_the_process():
    engine = await started("break:3")
    await engine.ready()

    async def ends(name: str) -> str | None:
        try:
            return (await collect(engine, request(name, 200)))[-1].finish
        except EngineDead:
            return "dead"

    outcomes = await asyncio.wait_for(asyncio.gather(*map(ends, "abcd")), 10)
    assert set(outcomes) <= {"error", "dead"}
    await asyncio.wait_for(engine.died.wait(), 5)
    assert await engine.close() == 1


async def test_a_killed_engine_raises_at_once_for_all_who_wait():
    engine = await started("slow:0.05")
    await engine.ready()
    waiting = [asyncio.create_task(collect(engine, request(n, 1000))) for n in "abc"]
    await asyncio.sleep(0.3)
    assert engine._process is not None
    engine._process.send_signal(signal.SIGKILL)
    started_at = time.monotonic()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - started_at < 2
    assert all(isinstance(r, EngineDead) for r in results)
    with pytest.raises(EngineDead):
        engine.open((request("late"),))
    assert await engine.close() == -signal.SIGKILL


async def test_stopping_ends_pending_requests():
    engine = await started("slow:0.02")
    await engine.ready()
    waiting = asyncio.create_task(collect(engine, request("a", 1000)))
    await asyncio.sleep(0.2)
    assert await engine.close() == 0
    assert (await waiting)[-1].finish == "abort"


def test_the_engine_process_dies_with_its_parent():
    parent = f"""
import asyncio, os, sys
from onechip.config import EngineConfig
from onechip.engine.client import RemoteEngine
async def main():
    engine = await RemoteEngine.start("fake", EngineConfig(), {COMMAND!r})
    await engine.ready()
    print(engine._process.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=30, check=False
    )
    child = int(done.stdout)
    for _ in range(50):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if (
            Path(f"/proc/{child}/stat").exists()
            and " Z " in Path(f"/proc/{child}/stat").read_text()
        ):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the engine process outlived its parent")


async def test_an_engine_that_is_still_loading_is_ended_at_once():
    engine = await started("loading:30")
    await asyncio.sleep(0.5)
    begin = time.monotonic()
    assert await engine.close() != 0
    assert time.monotonic() - begin < 3
    with pytest.raises(EngineDead):
        await engine.ready()
