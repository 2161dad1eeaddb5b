"""The wire and its client: nothing changes on the way, streams end once, and what nobody wants is aborted."""

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.fakes import FakeEngine

from onechip.config import EngineConfig
from onechip.engine import wire
from onechip.engine.client import RemoteEngine, merge
from onechip.engine.process import serve_engine
from onechip.request import (
    EngineInfo,
    EngineStats,
    Event,
    Grammar,
    Request,
    SamplingParams,
    TokenLogprobs,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[RemoteEngine]:
    """A client joined to an engine that runs in a thread of this process, over the real sockets."""
    with tempfile.TemporaryDirectory() as directory:
        client = RemoteEngine(f"ipc://{directory}/e")
        thread = threading.Thread(target=serve_engine, args=(engine, client.endpoint))
        thread.start()
        await client.ready()
        try:
            yield client
        finally:
            await client.close()
            thread.join(5)
            assert not thread.is_alive()


def request(name: str, *prompt: int, **sampling: object) -> Request:
    params = SamplingParams(seed=1, **sampling)  # type: ignore[arg-type]
    return Request(name, prompt or (10,), params)


async def until(condition, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "message",
    [
        wire.Start("demo", EngineConfig(max_model_len=7)),
        wire.Submit(
            (Request("a", (1, 2), SamplingParams(logit_bias={5: -1.5}, stop=("x",)), (1,)),)
        ),
        wire.Submit(
            (
                Request(
                    "a",
                    (1,),
                    SamplingParams(),
                    grammar=Grammar("json_schema", "{}", "calls: ", "may_open", 100, 101, "", "x"),
                ),
            )
        ),
        wire.Abort(("a", "b")),
        wire.Stop(),
    ],
)
def test_messages_to_the_engine_survive(message: wire.ToEngine):
    assert wire.decode_to_engine(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Ready(EngineInfo(10, 20, 3, 40, "cpu", "float32", 1.0, 2.0, 3.0)),
        wire.Failed("no such file", expected=True),
        wire.Batch(
            (
                Event("a", (1, 2), (TokenLogprobs(1, -0.5, (3,), (-1.0,)),), (None,), "stop", 2),
                Event("b", finish="error", error="why", error_code="x", error_param="y"),
            ),
            EngineStats(running=3),
        ),
        wire.Fatal("broken"),
    ],
)
def test_messages_from_the_engine_survive(message: wire.FromEngine):
    assert wire.decode_from_engine(wire.encode(message)) == message


def test_merging_keeps_every_token_in_order_and_the_end():
    events = [
        Event("a", (1,), prompt_logprobs=(None,)),
        Event("b", (7,)),
        Event("a", (2, 3), finish="stop", stopped_by=3),
    ]
    a, b = merge(events)
    assert a == Event("a", (1, 2, 3), prompt_logprobs=(None,), finish="stop", stopped_by=3)
    assert b == events[1]


async def test_many_requests_at_once_each_end_once_with_all_their_tokens():
    async with served(FakeEngine(max_model_len=4096)) as client:

        async def run(i: int) -> None:
            wanted = request(f"r{i}", 10 + i, max_tokens=20 + i)
            events = [event async for event in client.generate(wanted)]
            tokens = [t for event in events for t in event.token_ids]
            assert tokens == [(11 + i + j) % 600 for j in range(20 + i)]
            assert [e.finish for e in events if e.finish] == ["length"]

        await asyncio.gather(*(run(i) for i in range(100)))
        await until(lambda: client.stats.running == 0)


async def test_leaving_a_stream_early_aborts_and_a_normal_end_does_not():
    engine = FakeEngine(sleep=0.002, max_model_len=100_000)
    async with served(engine) as client:
        events = client.generate(request("early", max_tokens=50_000))
        async for _ in events:
            break
        await events.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(anext(aiter(client.open((request("x", max_tokens=50_000),)))))
        await until(lambda: engine.aborted == ["early"] and "early" not in engine.rows)
        await task
        async for _ in client.generate(request("normal", max_tokens=3)):
            pass
        assert engine.aborted == ["early"]


async def test_cancelling_the_consumer_aborts():
    engine = FakeEngine(sleep=0.002, max_model_len=100_000)
    async with served(engine) as client:

        async def consume() -> None:
            with client.open((request("c", max_tokens=50_000),)) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(consume())
        await until(lambda: "c" in engine.rows)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: client.stats.running == 0 and engine.aborted == ["c"])


async def test_a_refused_request_ends_with_an_error_event_and_its_neighbour_runs():
    async with served(FakeEngine(vocab_size=100)) as client:
        with client.open((request("bad", 100), request("good", 5, max_tokens=2))) as stream:
            events = {e.request_id: e async for batch in stream for e in batch if e.finish}
        assert events["bad"].finish == "error" and events["bad"].error_code == "invalid_value"
        assert "0 to 99" in (events["bad"].error or "")
        assert events["good"].finish == "length"


async def test_one_choice_can_be_aborted_while_the_others_go_on():
    async with served(FakeEngine(sleep=0.001)) as client:
        with client.open((request("a", max_tokens=200), request("b", max_tokens=30))) as stream:
            first = await anext(stream)
            assert {e.request_id for e in first} <= {"a", "b"}
            stream.abort("a")
            later = [event async for events in stream for event in events]
        assert {e.request_id for e in later} == {"b"}
        assert later[-1].finish == "length"


async def test_the_wire_carries_far_more_than_twenty_thousand_tokens_a_second():
    rows, tokens = 128, 100
    async with served(FakeEngine(max_model_len=4096)) as client:

        async def run(i: int) -> int:
            wanted = request(f"r{i}", max_tokens=tokens)
            return sum([len(e.token_ids) async for e in client.generate(wanted)])

        begin = time.monotonic()
        total = sum(await asyncio.gather(*(run(i) for i in range(rows))))
        rate = total / (time.monotonic() - begin)
    assert total == rows * tokens
    print(f"{rate:.0f} tokens/s")
    assert (
        rate > 5_000
    )  # a loose bound: the engine thread and the client share one interpreter here
