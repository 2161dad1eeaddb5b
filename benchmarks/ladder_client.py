"""How many streamed tokens a second the ladder's own client follows, and what that costs it.

A stub in a process of its own sends one chunk a token on 64 connections, paced to a little more than the rate asked
for; the client measures it like any server. On two cores the pair has one core each, so this is the whole of what a
ladder on a small machine can do.

    python benchmarks/ladder_client.py [tokens per second, default 20000]
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.ladder.stub import stub

from onechip.ladder import figures, load
from onechip.ladder.client import Client, Target
from onechip.ladder.http import run
from onechip.ladder.record import ClientCost
from onechip.ladder.stream import Answer

STREAMS, SECONDS = 64, 4


async def follow(url: str, tokens: int) -> tuple[float, ClientCost, float]:
    """Tokens per second, what the client spent, and the p99 gap in ms."""
    async with Client(Target(url, model="stub")) as client:

        async def send(text: str) -> Answer:
            return await client.complete(text, max_tokens=tokens)

        await load.closed(send, [f"warm {n}" for n in range(STREAMS)], STREAMS)
        with load.metered() as meter:
            answers = await load.closed(send, [f"run {n}" for n in range(STREAMS)], STREAMS)
            await asyncio.sleep(0)
        repeat = figures.repeat_of(answers)
        assert all(r.error is None for r in repeat.requests)
        cost = meter.cost(sum(len(a.arrivals) for a in answers))
        return figures.rates([repeat])[0], cost, figures.percentiles([repeat])["itl"]["p99"]


def measured(rate: float, seconds: float = SECONDS) -> tuple[float, ClientCost, float]:
    """`follow` at `rate` tokens a second over all streams."""
    gap = STREAMS / rate
    with stub(gap=gap) as url:
        return run(follow(url, int(seconds / gap)))


if __name__ == "__main__":
    wanted = float(sys.argv[1]) if len(sys.argv) > 1 else 20_000.0
    rate, cost, gap_ms = measured(wanted * 1.05)
    print(
        f"{rate:,.0f} tok/s followed over {STREAMS} streams; client at {cost.cpu_share:.0%} of a core, "
        f"loop late by {cost.lag_ms_p50:.1f} ms (median), {cost.lag_ms_max:.1f} ms (worst), "
        f"p99 gap {gap_ms:.1f} ms of {1000 * STREAMS / wanted / 1.05:.1f}"
    )
