"""`onechip ladder run`: every arm in its turn, the same jobs on each, one record an arm.

1. Start the arm's server (`process`), wait for its first answer, and note both seconds.
2. Open its record and do the jobs, all against this one start. A job that cannot be done (no data, an endpoint the
   server lacks) becomes an issue of the record and the next one is tried; a server that died takes its other jobs with
   it, and the record names what is missing. A record that cannot be written ends the arm: the next would not fare
   better, but it is asked.
3. Stop the server, whatever happened.
4. An arm that failed does not stop the next. Ctrl-C and SIGTERM do, after the stop and with the record closed.
"""

import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from onechip.errors import ArmFailed, OnechipError
from onechip.ladder import process, session
from onechip.ladder.arm import Arm
from onechip.ladder.client import Client, Target
from onechip.ladder.facts import ServerFacts
from onechip.ladder.http import run
from onechip.ladder.journal import new_header, open_run
from onechip.ladder.process import Running
from onechip.ladder.progress import Progress
from onechip.ladder.record import (
    Hardware,
    Header,
    Issue,
    Model,
    RecordError,
    Software,
    Startup,
)
from onechip.ladder.session import Job, Session

Say = Callable[[str], None]
FIRST_ANSWER_S = 300.0


@dataclass(frozen=True)
class Climb:
    """What every arm gets; `jobs` are by name, in order."""

    folder: Path
    jobs: Mapping[str, Job]
    hardware: Hardware
    environment: Mapping[str, str]
    command: Sequence[str] = ()
    resume: bool = False
    timeout: float = 600.0
    api_key: str | None = None


def climb(arms: Sequence[Arm], plan: Climb, progress: Progress, say: Say) -> list[str]:
    """Measure every arm. Returns a line for each that failed; each has a record in `folder` all the same."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    with terminable():
        for arm in arms:
            say(f"{arm.name}: starting")
            try:
                problems = _measure(arm, plan, progress, say)
            except OnechipError as error:
                problems = [error.message]
            failures += [f"{arm.name}: {problem}" for problem in problems]
    return failures


@contextmanager
def terminable() -> Generator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that there is one way out and it stops the server."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(arm: Arm, plan: Climb, progress: Progress, say: Say) -> list[str]:
    out = plan.folder / f"{arm.name}.json"
    header = _header(arm, plan)
    try:
        with process.started(arm, plan.folder / f"{arm.name}.log", plan.environment) as running:
            startup = _first_answer(running, plan)
            say(f"{arm.name}: {_started(startup)}")
            return _do_jobs(running, startup, header, out, plan, progress)
    except ArmFailed as error:
        _record_failure(out, header, error.message, plan)
        raise


def _do_jobs(
    running: Running, startup: Startup, header: Header, out: Path, plan: Climb, progress: Progress
) -> list[str]:
    arm = running.arm
    target = _target(arm, plan)
    server = session.server_facts(target)
    problems: list[str] = []
    jobs = [_noting(startup), *(_careful(n, j, running, problems) for n, j in plan.jobs.items())]
    header = _joined(header, server)
    record = session.recorded(target, server, header, out, jobs, progress, resume=plan.resume)
    problems += [f"{e.task}: {e.reason}" for e in record.evals if e.status != "ok"]
    return problems


def _careful(name: str, job: Job, running: Running, problems: list[str]) -> Job:
    """The job, except that what goes wrong is an issue of the record and the next job still has its turn."""

    async def careful(session: Session) -> None:
        try:
            if died := running.death():
                raise ArmFailed(f"not measured, the server {died}")
            await job(session)
            if died := running.death():
                raise ArmFailed(f"the server {died}")
        except RecordError:
            raise
        except OnechipError as error:
            problems.append(f"{name}: {error.message}")
            session.journal.add(Issue(text=problems[-1]))

    return careful


def _noting(startup: Startup) -> Job:
    async def note(session: Session) -> None:
        session.journal.add(startup)

    return note


def _started(startup: Startup) -> str:
    if startup.first_answer_s is None:
        return "answers"
    return f"first answer after {startup.first_answer_s:.1f} s"


def _target(arm: Arm, plan: Climb) -> Target:
    return Target(
        arm.url, arm.model or None, plan.api_key, timeout=plan.timeout, extra=dict(arm.request)
    )


def _first_answer(running: Running, plan: Climb) -> Startup:
    """One token, asked as a chat and, of a server without a chat template, as a completion."""
    target = replace(_target(running.arm, plan), timeout=FIRST_ANSWER_S)

    async def ask() -> str | None:
        async with Client(target) as client:
            await client.discover()
            messages = [{"role": "user", "content": "Hi"}]
            answer = await client.chat(messages, max_tokens=1, temperature=0)
            if answer.error is not None and answer.error.kind == "status":
                answer = await client.complete("Hi", max_tokens=1, temperature=0)
            return answer.error.message if answer.error else None

    wrong = run(ask())
    if wrong is not None:
        raise ArmFailed(
            f"healthy, but its first answer failed: {wrong}. {process.log_end(running.log)}"
        )
    if running.launched is None:
        return Startup()
    return Startup(healthy_s=running.healthy_s, first_answer_s=time.monotonic() - running.launched)


def _header(arm: Arm, plan: Climb) -> Header:
    """What is known before the server runs: the arm's own words, and what its commands print."""
    packages = process.outputs(arm.commands, plan.environment)
    digest = packages.pop("digest", None)
    software = Software(
        engine=arm.engine,
        version=packages.pop("version", None),
        serve_args=arm.start.command if arm.start else (),
        packages=packages,
        image_digest=digest,
        url=arm.url,
    )
    model = Model(
        id=arm.model or arm.name,
        weights=arm.weights or None,
        kv_cache_dtype=arm.kv_cache_dtype or None,
    )
    return new_header(model, software, plan.hardware, command=plan.command, arm=arm.name)


def _joined(header: Header, server: ServerFacts) -> Header:
    """The arm's words win; the server fills in what the arm left open."""
    software = _filled(header.software, server.software)
    model = _filled(header.model, server.model)
    model = msgspec.structs.replace(model, id=server.model.id)
    return msgspec.structs.replace(header, software=software, model=model)


def _filled(mine: Any, theirs: Any) -> Any:
    empty = {
        name: getattr(theirs, name)
        for name in mine.__struct_fields__
        if getattr(mine, name) in (None, "", (), {})
    }
    return msgspec.structs.replace(mine, **empty)


def _record_failure(out: Path, header: Header, why: str, plan: Climb) -> None:
    """A record that says why there is nothing in it, unless there is one with something."""
    try:
        with open_run(out, header, resume=plan.resume) as journal:
            journal.add(Issue(text=why))
            raise _Failed
    except _Failed:
        pass
    except RecordError:
        pass  # the arm's own error is the one that is told


class _Failed(Exception):
    """Ends a record as failed."""
