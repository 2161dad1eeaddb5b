"""What every measurement of speed shares: reach the server, open the record, try again what failed, end well.

Owns the frame of a run and what a cell's status is; the workloads are `one` and `sweep`.

A cell is **ok** when every timed request was good. **infeasible**: the server refused the work as such (a 400 for a
context that is too long). **failed**: anything else went wrong; what was measured is in it. **missing**: not tried,
because the server was gone. A server that cannot be reached after a failure ends the run: what is left is recorded as
missing, and `--resume` takes it up again.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from onechip.errors import OnechipError
from onechip.ladder import facts
from onechip.ladder.client import Client, Target
from onechip.ladder.http import Failed
from onechip.ladder.journal import Journal, new_header, open_run
from onechip.ladder.progress import Progress
from onechip.ladder.prompts import Endpoint
from onechip.ladder.record import Cell, CellStatus, Hardware, Issue, Repeat, Software, Workload
from onechip.ladder.stream import Failure

REFUSED = (400, 413, 422)


class ServerGone(OnechipError):
    """The server died while it was measured."""


@dataclass(frozen=True)
class Place:
    """Where a run is recorded and what is known of the server beforehand."""

    out: Path
    resume: bool = False
    command: tuple[str, ...] = ()
    hardware: Hardware = field(default_factory=facts.this_host)
    software: Software = field(default_factory=Software)
    weights: str | None = None
    kv_cache_dtype: str | None = None
    model_digest: str | None = None
    arm: str | None = None


@dataclass(frozen=True)
class Bench:
    """A run under way."""

    client: Client
    server: facts.ServerFacts
    journal: Journal
    progress: Progress

    @property
    def price(self) -> float | None:
        return self.journal.header.hardware.price_per_hour


@asynccontextmanager
async def opened(target: Target, place: Place, progress: Progress) -> AsyncGenerator[Bench]:
    """A client on a server that answers, and an open record of it. Raises Unreachable, RecordError."""
    async with Client(target) as client:
        server = await facts.ask(client)
        software = described(place.software, server.software)
        model = structs.replace(
            server.model,
            weights=place.weights,
            kv_cache_dtype=place.kv_cache_dtype,
            digest=place.model_digest,
        )
        header = new_header(model, software, place.hardware, command=place.command, arm=place.arm)
        with open_run(place.out, header, resume=place.resume) as journal:
            yield Bench(client, server, journal, progress)


def described(known: Software, asked: Software) -> Software:
    """What is known beforehand, filled up with what the server says of itself."""
    return Software(
        engine=known.engine or asked.engine,
        version=known.version or asked.version,
        serve_args=known.serve_args,
        packages=known.packages,
        image_digest=known.image_digest,
        url=asked.url,
    )


def status_of(repeats: Sequence[Repeat]) -> tuple[CellStatus, str | None, tuple[Failure, ...]]:
    """A cell's status, why, and its different errors."""
    requests = [r for repeat in repeats for r in repeat.requests]
    failures = [r.error for r in requests if r.error is not None]
    if not failures:
        return ("ok", None, ()) if requests else ("failed", "no request was sent", ())
    different = tuple(dict.fromkeys(failures))[:8]
    first = different[0]
    if len(failures) == len(requests) and first.status in REFUSED:
        return "infeasible", first.message, different
    reason = f"{len(failures)} of {len(requests)} requests failed: {first.kind}: {first.message}"
    return "failed", reason, different


async def check_alive(bench: Bench, left: Sequence[Workload]) -> None:
    """After a failure: is the server still there? Raises ServerGone, with what is `left` recorded as missing."""
    try:
        await bench.client.models()
    except Failed as error:
        for workload in left:
            cell = Cell(workload=workload, status="missing", reason="the server was gone")
            bench.journal.add(cell)
        bench.journal.add(Issue(text=f"the server was gone: {error.message}"))
        raise ServerGone(
            f"{bench.client.target.url} is gone ({error.message}); what was measured is in "
            f"{bench.journal.path}: start the server and run again with --resume"
        ) from None


async def choose_endpoint(client: Client, wanted: Endpoint | None, first: Endpoint) -> Endpoint:
    """The endpoint asked for, else `first` if the server takes it, else the other."""
    if wanted is not None:
        return wanted
    if first == "chat":
        hello = await client.chat([{"role": "user", "content": "Hello"}], max_tokens=1)
    else:
        hello = await client.complete("Hello", max_tokens=1)
    if hello.error is not None and hello.error.kind == "status":
        return "completions" if first == "chat" else "chat"
    return first
