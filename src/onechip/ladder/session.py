"""One server, one record: the frame that every measurement of a running server is done in.

1. Ask the server what it is. 2. Open the record (`journal`), with what is known. 3. Do the jobs one after the other on
one client; each puts what it measures into the record as it goes. 4. Close the record, however it ended.

The event loop lives inside step 3 only, so that Ctrl-C reaches the record as what it is.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onechip.ladder import facts
from onechip.ladder.client import Client, Target
from onechip.ladder.facts import ServerFacts
from onechip.ladder.http import run
from onechip.ladder.journal import Journal, new_header, open_run
from onechip.ladder.progress import Progress, shown
from onechip.ladder.record import Hardware, Header, Record


@dataclass(frozen=True)
class Session:
    """What a job works with."""

    client: Client
    server: ServerFacts
    journal: Journal
    progress: Progress


Job = Callable[[Session], Awaitable[None]]


def server_facts(target: Target) -> ServerFacts:
    """What the server says of itself. Raises Unreachable."""

    async def ask() -> ServerFacts:
        async with Client(target) as client:
            return await facts.ask(client)

    return run(ask())


def measure(
    target: Target,
    out: Path,
    jobs: Sequence[Job],
    *,
    hardware: Hardware,
    resume: bool = False,
    command: Sequence[str] = (),
) -> Record:
    """Do the jobs on a server that runs already and return its record. Raises Unreachable and RecordError."""
    server = server_facts(target)
    header = new_header(server.model, server.software, hardware, command=command)
    with shown() as progress:
        return recorded(target, server, header, out, jobs, progress, resume=resume)


def recorded(
    target: Target,
    server: ServerFacts,
    header: Header,
    out: Path,
    jobs: Sequence[Job],
    progress: Progress,
    *,
    resume: bool = False,
) -> Record:
    """Steps 2 to 4."""
    target = replace(target, model=server.model.id)
    with open_run(out, header, resume=resume) as journal:
        run(_do(target, server, journal, jobs, progress))
    return journal.record


async def _do(
    target: Target, server: ServerFacts, journal: Journal, jobs: Sequence[Job], progress: Progress
) -> None:
    async with Client(target) as client:
        for job in jobs:
            await job(Session(client, server, journal, progress))
