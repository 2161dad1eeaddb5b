"""The evals and probes as jobs of a session: the joint between flags and what they mean.

Owns which questions a job asks; how it asks is `evaluation` and `probes`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onechip.ladder import (
    bfcl,
    datasets,
    evaluation,
    gsm8k,
    probe_schemas,
    probe_text,
    probe_tools,
    probes,
    tasks,
)
from onechip.ladder.evaluation import Plan
from onechip.ladder.probes import Probe
from onechip.ladder.session import Job, Session
from onechip.ladder.tasks import Endpoint, Task, Thinking

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
    endpoint: Endpoint = "chat"
    plan: Plan = field(default_factory=Plan)


def gsm8k_task(wanted: Questions, say: datasets.Say) -> Task:
    found, digest = datasets.load_gsm8k(wanted.data, wanted.cache, say)
    task = tasks.gsm8k_task(
        found,
        digest,
        endpoint=wanted.endpoint,
        thinking=wanted.thinking,
        max_tokens=wanted.max_tokens or gsm8k.MAX_TOKENS,
    )
    return _limited(task, wanted.limit)


def bfcl_task(wanted: Questions, say: datasets.Say) -> Task:
    found, digest = datasets.load_bfcl(wanted.data, wanted.cache, say)
    task = tasks.bfcl_task(
        found, digest, thinking=wanted.thinking, max_tokens=wanted.max_tokens or bfcl.MAX_TOKENS
    )
    return _limited(task, wanted.limit)


def _limited(task: Task, limit: int | None) -> Task:
    return task if limit is None else replace(task, questions=task.questions[:limit])


def eval_job(task: Task, plan: Plan) -> Job:
    async def job(session: Session) -> None:
        ask = evaluation.asking(session.client)
        await evaluation.run(task, ask, session.journal, plan, session.progress)

    return job


def probes_job(groups: tuple[str, ...] = tuple(PROBES)) -> Job:
    wanted = [probe for group in groups for probe in PROBES[group]()]

    async def job(session: Session) -> None:
        length = session.server.model.max_model_len
        await probes.run_all(wanted, session.client, length, session.journal, session.progress)

    return job
