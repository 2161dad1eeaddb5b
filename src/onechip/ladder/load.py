"""Many requests at once: closed (a number in flight) and open (arrivals by the clock), and what measuring cost.

Owns when a request is sent. What is sent is the caller's `ask`; what the times mean is `figures`.

A closed load keeps `concurrency` requests in flight until the prompts are used up. An open load sends by a schedule
drawn beforehand (gamma gaps: burstiness 1 is Poisson, below 1 comes in bursts), whatever the server does: that is what
users do, and it shows queueing that a closed load hides.

A server that cannot be reached any more ends the pass: requests not yet sent are not tried against nobody, and those in
flight have their connections broken by the death itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from onechip.ladder.record import ClientCost
from onechip.ladder.stream import Answer

Ask = Callable[[str], Awaitable[Answer]]

LAG_EVERY = 0.01  # seconds between two looks at how late the event loop is


async def closed(ask: Ask, prompts: Sequence[str], concurrency: int) -> list[Answer]:
    """Answers in the order of the prompts; fewer when the server was gone."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))
    gone = False

    async def worker() -> None:
        nonlocal gone
        for number, prompt in waiting:
            if gone:
                return
            answers[number] = await ask(prompt)
            gone = gone or unreachable(answers[number])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(worker())
    return [answers[number] for number in sorted(answers)]


async def scheduled(ask: Ask, prompts: Sequence[str], arrivals: Sequence[float]) -> list[Answer]:
    """Send prompt i at `arrivals[i]` seconds from now; answers in order, fewer when the server was gone."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    tasks: list[asyncio.Task[Answer]] = []
    async with asyncio.TaskGroup() as group:
        for prompt, at in zip(prompts, arrivals, strict=True):
            await asyncio.sleep(max(0.0, start + at - loop.time()))
            if any(task.done() and unreachable(task.result()) for task in tasks[-64:]):
                break
            tasks.append(group.create_task(_answer(ask, prompt)))
    return [task.result() for task in tasks]


async def _answer(ask: Ask, prompt: str) -> Answer:
    return await ask(prompt)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which `count` requests come, `rate` a second on average; the last comes at (count - 1) / rate.

    Gaps are gamma with shape `burstiness`, scaled to the exact mean as in vLLM's bench: two runs carry the same load.
    """
    if count < 2:
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count - 1)
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    return [float(t) for t in times * ((count - 1) / rate / times[-1])]


def unreachable(answer: Answer) -> bool:
    return answer.error is not None and answer.error.kind == "connect"


@dataclass
class Meter:
    """What the measuring process itself spent since `start`."""

    start: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)
    lags: list[float] = field(default_factory=list[float])

    def cost(self, chunks: int) -> ClientCost:
        wall = max(time.perf_counter() - self.start, 1e-9)
        lags = sorted(self.lags) or [0.0]
        return ClientCost(
            cpu_share=round((time.process_time() - self.cpu) / wall, 4),
            lag_ms_p50=round(1000 * lags[len(lags) // 2], 3),
            lag_ms_max=round(1000 * lags[-1], 3),
            chunks_per_s=round(chunks / wall, 1),
        )


@contextmanager
def metered() -> Generator[Meter]:
    """Watch this process and its event loop while the block runs."""
    meter = Meter()
    watching = asyncio.get_running_loop().create_task(_watch(meter))
    try:
        yield meter
    finally:
        watching.cancel()


async def _watch(meter: Meter) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_EVERY)
        meter.lags.append(max(0.0, time.perf_counter() - before - LAG_EVERY))
