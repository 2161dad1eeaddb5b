"""Running an eval: who is asked when, what stops it early, and its totals.

Owns the order of requests and the summary; what an answer is worth is `tasks`, how it reaches the disk `journal`.

1. Answers that are on record already, without an error, are not asked again.
2. The gate: the first 50 questions go first. Below the wanted accuracy the run stops: a server that cannot answer
   those (a wrong template, a broken kernel) need not be asked 1,269 more times.
3. The rest, one at a time or several at once. Every answer is on the disk before its worker asks the next question.
4. When 20 requests in a row fail the server is taken for gone. What failed is asked again by a resumed run.

`wall_s` is the time spent asking. For answers of an earlier, broken run nobody took it: their latencies, divided by the
number asked at once, stand in.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from msgspec.structs import replace

from onechip.errors import ConfigError, OnechipError
from onechip.ladder import tasks
from onechip.ladder.client import Client
from onechip.ladder.journal import Journal
from onechip.ladder.progress import Progress
from onechip.ladder.record import CellStatus, Eval, Figures, Item, Record
from onechip.ladder.stream import Answer
from onechip.ladder.tasks import Question, Task

FAILURES_IN_A_ROW = 20


class Stopped(OnechipError):
    """An eval ended before its last question, for the reason it says."""


class Ask(Protocol):
    """Where questions go; `Client` is one through `asking`."""

    async def __call__(self, question: Question, max_tokens: int) -> Answer: ...


@dataclass(frozen=True)
class Plan:
    """`gate` is the least accuracy on the first questions; 0 asks everything whatever comes."""

    concurrency: int = 1
    gate: float = 0.25


def asking(client: Client) -> Ask:
    async def ask(question: Question, max_tokens: int) -> Answer:
        if question.prompt is not None:
            return await client.complete(question.prompt, max_tokens=max_tokens, **question.fields)
        return await client.chat(question.messages, max_tokens=max_tokens, **question.fields)

    return ask


async def run(task: Task, ask: Ask, journal: Journal, plan: Plan, progress: Progress) -> Eval:
    """Ask what is not on record and add the totals to the journal. The Eval's status and reason say how it ended.

    Raises RecordError when an answer cannot be written.
    """
    _refuse_other_settings(task, journal)
    kept = {i: item for i, item in journal.items(task.name).items() if item.error is None}
    # What a killed run leaves says that it was not finished, and under which settings it ran.
    settings = dict(task.settings)
    journal.add(Eval(task=task.name, status="missing", settings=settings, reason="not finished"))
    started = perf_counter()
    progress.start(task.name, len(task.questions))
    for _ in kept:
        progress.step("on record")
    asker = _Asker(task, ask, journal, progress, set(kept))
    reason = None
    try:
        await asker.all_of(task.questions[: task.gate], plan.concurrency)
        _check_gate(task, journal, plan.gate)
        await asker.all_of(task.questions[task.gate :], plan.concurrency)
    except Stopped as stopped:
        reason = stopped.message
    wall = (
        perf_counter() - started + sum(i.latency_s or 0 for i in kept.values()) / plan.concurrency
    )
    done = summary(task, journal.items(task.name).values(), wall, plan.concurrency, reason)
    journal.add(done)
    return done


@dataclass
class _Asker:
    """The workers' common state: `failures` counts requests that failed since one was answered."""

    task: Task
    ask: Ask
    journal: Journal
    progress: Progress
    known: set[str]
    failures: int = 0

    async def all_of(self, questions: Sequence[Question], concurrency: int) -> None:
        left = iter([question for question in questions if question.id not in self.known])
        workers = [asyncio.create_task(self._work(left)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, left: Iterable[Question]) -> None:
        for question in left:
            answer = await self.ask(question, self.task.max_tokens)
            item = tasks.score(item_of(self.task.name, question, answer))
            self.journal.add(item)
            self.progress.step(item.verdict)
            self.failures = 0 if item.error is None else self.failures + 1
            if item.error is not None and self.failures >= FAILURES_IN_A_ROW:
                raise Stopped(
                    f"{self.failures} requests in a row failed, the last with {item.error.message!r}; "
                    "look after the server and run again with --resume"
                )


def _check_gate(task: Task, journal: Journal, least: float) -> None:
    items = journal.items(task.name)
    first = [items[q.id] for q in task.questions[: task.gate] if q.id in items]
    right = sum(item.right for item in first)
    if first and right / len(first) < least:
        raise Stopped(
            f"gate: {right} of the first {len(first)} are right ({right / len(first):.3f}), below --gate {least:g}; "
            "look at the answers in the record, or give --gate 0 to ask all the same"
        )


def _refuse_other_settings(task: Task, journal: Journal) -> None:
    """Answers to another prompt or of another length must not be mixed into one score."""
    for entry in journal.entries:
        if (
            isinstance(entry, Eval)
            and entry.task == task.name
            and entry.settings != dict(task.settings)
        ):
            differing = [k for k in task.settings if entry.settings.get(k) != task.settings[k]]
            raise ConfigError(
                f"{journal.path} holds {task.name} answers under other settings ({', '.join(differing)}); "
                "name another --out"
            )


def item_of(task: str, question: Question, answer: Answer) -> Item:
    """An answer as a record keeps it, not scored yet."""
    usage = answer.usage
    return Item(
        task=task,
        id=question.id,
        right=False,
        verdict="",
        expected=question.expected,
        text=answer.text,
        reasoning=answer.reasoning,
        tool_calls=tuple({"name": c.name, "arguments": c.arguments} for c in answer.tool_calls),
        finish_reason=answer.finish_reason,
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        latency_s=None if answer.finish is None else answer.finish - answer.sent,
        error=answer.error,
    )


def summary(
    task: Task, items: Iterable[Item], wall_s: float, concurrency: int, reason: str | None
) -> Eval:
    """The totals; an eval is ok when every question has an answer."""
    known = {question.id for question in task.questions}
    asked = [item for item in items if item.id in known]
    figures = totals(asked)
    figures |= {"wall_s": round(wall_s, 3), "concurrency": float(concurrency)}
    figures |= {"questions": float(len(known))}
    errors = [item.error.message for item in asked if item.error is not None]
    if errors and not reason:
        reason = f"{len(errors)} requests failed ({errors[0]}); --resume asks them again"
    if missing := len(known) - len(asked):
        reason = f"{reason}; {missing} of {len(known)} questions were not asked"
    status: CellStatus = "failed" if reason else "ok"
    return Eval(
        task=task.name, status=status, settings=dict(task.settings), figures=figures, reason=reason
    )


def totals(items: Sequence[Item]) -> Figures:
    """n, right, accuracy, errors and truncated. A failed request counts as not right."""
    right = sum(item.right for item in items)
    return {
        "n": float(len(items)),
        "right": float(right),
        "accuracy": right / len(items) if items else 0.0,
        "errors": float(sum(item.error is not None for item in items)),
        "truncated": float(sum(item.finish_reason == "length" for item in items)),
    }


def rescored(record: Record) -> tuple[Record, list[tuple[Item, Item]]]:
    """The record with every answer scored by this version's rules, and the answers whose verdict changed."""
    items = tuple(tasks.score(item) for item in record.items)
    pairs = zip(record.items, items, strict=True)
    changed = [
        (old, new) for old, new in pairs if (old.right, old.verdict) != (new.right, new.verdict)
    ]
    evals = tuple(
        replace(e, figures={**e.figures, **totals([i for i in items if i.task == e.task])})
        for e in record.evals
    )
    return replace(record, items=items, evals=evals), changed
