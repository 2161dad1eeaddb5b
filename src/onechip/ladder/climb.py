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

from onechip.errors import ArmFailed, ConfigError, OnechipError
from onechip.ladder import process
from onechip.ladder.arm import Arm
from onechip.ladder.bench import Bench, Place, opened
from onechip.ladder.client import Client, Target
from onechip.ladder.http import run
from onechip.ladder.jobs import Job
from onechip.ladder.journal import Journal, load, new_header
from onechip.ladder.process import Running
from onechip.ladder.progress import Progress
from onechip.ladder.record import (
    Hardware,
    Issue,
    Memory,
    Model,
    RecordError,
    Software,
    Startup,
    journal_path,
)
from onechip.ladder.tables import label

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
    _refuse_taken(arms, plan)
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


def _refuse_taken(arms: Sequence[Arm], plan: Climb) -> None:
    """Before a server is started for minutes: each arm has a record of its own, and none is overwritten."""
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"an arm is given twice among {', '.join(names)}; give a copy of its file another name"
        )
    for out in (plan.folder / f"{name}.json" for name in names):
        if _is_empty(out):
            out.unlink()
        elif not plan.resume and (out.exists() or journal_path(out).exists()):
            raise RecordError(f"{out} exists; add --resume to go on with it, or name another --out")


def _is_empty(out: Path) -> bool:
    """Whether this is the record of an arm that never came up."""
    if not out.exists():
        return False
    found = load(out)
    return found.run.status == "failed" and not (found.cells or found.items or found.probes)


@contextmanager
def terminable() -> Generator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that there is one way out and it stops the server."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    # A script's background jobs are started with SIGINT ignored: SIGTERM would be lost in it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _measure(arm: Arm, plan: Climb, progress: Progress, say: Say) -> list[str]:
    place = _place(arm, plan)
    try:
        with process.started(arm, plan.folder / f"{arm.name}.log", plan.environment) as running:
            startup = _first_answer(running, plan)
            say(f"{arm.name}: {_started(startup)}")
            return run(_do_jobs(running, startup, place, plan, progress))
    except ArmFailed as error:
        _record_failure(arm, place, error.message)
        raise


async def _do_jobs(
    running: Running, startup: Startup, place: Place, plan: Climb, progress: Progress
) -> list[str]:
    """Returns what went wrong, in words."""
    problems: list[str] = []
    async with opened(_target(running.arm, plan), place, progress) as bench:
        bench.journal.add(startup)
        for name, job in plan.jobs.items():
            await _careful(name, job, bench, running, problems)
        if (resident := running.resident_gib()) is not None:
            bench.journal.add(Memory(host_rss_gib=resident))
        record = bench.journal.record
    problems += [f"{e.task}: {e.reason}" for e in record.evals if e.status != "ok"]
    bad = [cell for cell in record.cells if cell.status in ("failed", "missing")]
    return problems + [f"{label(cell.workload)}: {cell.reason}" for cell in bad]


async def _careful(
    name: str, job: Job, bench: Bench, running: Running, problems: list[str]
) -> None:
    """Do the job; what goes wrong is an issue of the record, and the next job still has its turn."""
    try:
        if died := running.death():
            raise ArmFailed(f"not measured, the server {died}")
        await job(bench)
        if died := running.death():
            raise ArmFailed(f"the server {died}")
    except RecordError:
        raise
    except OnechipError as error:
        problems.append(f"{name}: {error.message}")
        bench.journal.add(Issue(text=homeless(problems[-1])))


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


def _place(arm: Arm, plan: Climb) -> Place:
    """The arm's own words, and what its commands print; the server fills in the rest once it runs."""
    packages = process.outputs(arm.commands, plan.environment)
    digest = packages.pop("digest", None)
    weights = packages.pop("model_digest", "").split()  # sha256sum prints the file's name too
    software = Software(
        engine=arm.engine or None,
        version=packages.pop("version", "").removeprefix(f"{arm.engine} ") or None,
        serve_args=tuple(map(homeless, arm.start.command)) if arm.start else (),
        packages={name: homeless(text) for name, text in packages.items()},
        image_digest=homeless(digest) if digest else None,
        url=arm.url,
    )
    return Place(
        out=plan.folder / f"{arm.name}.json",
        resume=plan.resume,
        command=tuple(map(homeless, plan.command)),
        hardware=plan.hardware,
        software=software,
        weights=arm.weights or None,
        kv_cache_dtype=arm.kv_cache_dtype or None,
        model_digest=weights[0] if weights else None,
        arm=arm.name,
    )


def homeless(text: str) -> str:
    """Without the folders of whoever measured: records are published."""
    for folder, short in ((Path.cwd(), "."), (Path.home(), "~")):
        text = text.replace(f"{folder}/", f"{short}/")
    return text


def _record_failure(arm: Arm, place: Place, why: str) -> None:
    """A record that says why there is nothing in it; one that has something already is left as it is."""
    if place.out.exists() or journal_path(place.out).exists():
        return
    model = Model(id=arm.model or arm.name, weights=place.weights)
    header = new_header(model, place.software, place.hardware, command=place.command, arm=place.arm)
    journal = Journal(place.out, header, [])
    journal.add(Issue(text=homeless(why)))
    journal.close("failed")
