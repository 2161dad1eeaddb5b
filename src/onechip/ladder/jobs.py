"""What can be done to a server, as jobs on one open run: the joint between flags and what they mean.

Owns which questions a job asks; how it asks is `evaluation` and `probes`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onechip.ladder import (
    bfcl,
    datasets,
    evaluation,
    gsm8k,
    one,
    probe_schemas,
    probe_text,
    probe_tools,
    probes,
    sweep,
    tasks,
)
from onechip.ladder.bench import Bench, choose_endpoint
from onechip.ladder.evaluation import Plan
from onechip.ladder.probes import Probe
from onechip.ladder.prompts import negotiate
from onechip.ladder.record import Issue
from onechip.ladder.tasks import Endpoint, Task, Thinking

Job = Callable[[Bench], Awaitable[object]]

PROBES: Mapping[str, Callable[[], list[Probe]]] = {
    "tools": probe_tools.probes,
    "schemas": probe_schemas.probes,
    "text": probe_text.probes,
}


@dataclass(frozen=True)
class Questions:
    """Which questions and how; None takes what was published."""

    data: Path | None
    cache: Path
    limit: int | None = None
    max_tokens: int | None = None
    thinking: Thinking = "off"
    endpoint: Endpoint | None = None
    plan: Plan = field(default_factory=Plan)


def gsm8k_job(wanted: Questions, say: datasets.Say) -> Job:
    """Raises NoData here and now, before any server is waited for."""
    found, digest = datasets.load_gsm8k(wanted.data, wanted.cache, say)
    asked, limit = found[: wanted.limit], wanted.max_tokens or gsm8k.MAX_TOKENS

    def make(endpoint: Endpoint, thinking: Thinking) -> Task:
        return tasks.gsm8k_task(
            asked, digest, endpoint=endpoint, thinking=thinking, max_tokens=limit
        )

    return _eval_job(make, wanted)


def bfcl_job(wanted: Questions, say: datasets.Say) -> Job:
    """Raises NoData here and now. Tools exist in chat only."""
    found, digest = datasets.load_bfcl(wanted.data, wanted.cache, say)
    asked, limit = found[: wanted.limit], wanted.max_tokens or bfcl.MAX_TOKENS

    def make(endpoint: Endpoint, thinking: Thinking) -> Task:
        return tasks.bfcl_task(asked, digest, thinking=thinking, max_tokens=limit)

    return _eval_job(make, replace(wanted, endpoint="chat"))


def _eval_job(make: Callable[[Endpoint, Thinking], Task], wanted: Questions) -> Job:
    async def job(bench: Bench) -> None:
        endpoint = await choose_endpoint(bench.client, wanted.endpoint, "chat")
        task = make(endpoint, await _thinking(bench, endpoint, wanted.thinking))
        ask = evaluation.asking(bench.client)
        await evaluation.run(task, ask, bench.journal, wanted.plan, bench.progress)

    return job


async def _thinking(bench: Bench, endpoint: Endpoint, wanted: Thinking) -> Thinking:
    """What was wanted, or `unset` where the server refuses to be told; then the record says so."""
    if endpoint == "completions" or wanted == "unset":
        return "unset"
    field = {"chat_template_kwargs": {"enable_thinking": wanted == "on"}}
    kept, notes = await negotiate(bench.client, endpoint, dict(field))
    for note in notes:
        bench.journal.add(Issue(text=note))
    return wanted if kept else "unset"


def probes_job(groups: tuple[str, ...] = tuple(PROBES)) -> Job:
    wanted = [probe for group in groups for probe in PROBES[group]()]

    async def job(bench: Bench) -> None:
        length = bench.server.model.max_model_len
        await probes.run_all(wanted, bench.client, length, bench.journal, bench.progress)

    return job


@dataclass(frozen=True)
class SpeedSettings:
    """What `one` and `sweep` measure; empty shapes and loads are the published ones."""

    shapes: tuple[tuple[int, int], ...] = ()
    loads: tuple[int, ...] = ()
    repeats: int = 5
    one_tokens: int = 256
    ignore_eos: bool = True
    endpoint: Endpoint | None = None


def one_job(speed: SpeedSettings) -> Job:
    settings = one.OneSettings(
        speed.one_tokens,
        min(speed.repeats, 3),
        endpoint=speed.endpoint,
        ignore_eos=speed.ignore_eos,
    )
    return lambda bench: one.measure(bench, settings)


def sweep_job(speed: SpeedSettings) -> Job:
    settings = sweep.SweepSettings(
        shapes=speed.shapes or sweep.SHAPES,
        concurrencies=speed.loads or sweep.CONCURRENCIES,
        repeats=speed.repeats,
        endpoint=speed.endpoint,
        ignore_eos=speed.ignore_eos,
    )
    return lambda bench: sweep.measure(bench, settings)


def chosen(
    names: Sequence[str],
    speed: SpeedSettings,
    asked: Questions,
    gsm8k_data: Path | None,
    bfcl_data: Path | None,
    say: datasets.Say,
) -> dict[str, Job]:
    """The jobs by name, in the order given. Raises NoData before any server is started."""

    made: Mapping[str, Callable[[], Job]] = {
        "one": lambda: one_job(speed),
        "sweep": lambda: sweep_job(speed),
        "gsm8k": lambda: gsm8k_job(replace(asked, data=gsm8k_data), say),
        "bfcl": lambda: bfcl_job(replace(asked, data=bfcl_data), say),
        "probes": probes_job,
    }
    return {name: made[name]() for name in names}
