"""`onechip bench one`: how fast one person is answered, by six fixed chat prompts.

Owns the workload: greedy, thinking off, 256 tokens each, one untimed and three timed passes one at a time, then four at
once. The score is the geometric mean over prompts of the median end-to-end tokens per second. Answers are kept, so that
two servers' texts can be compared, and a prompt counts as identical when every pass gave the same text.

A base model has no chat template: then the same texts go to the completions route, and the record says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onechip.ladder import figures, load, stats
from onechip.ladder.bench import Bench, check_alive, choose_endpoint, status_of
from onechip.ladder.prompts import ONE, Endpoint, ask, negotiate
from onechip.ladder.record import Cell, Repeat, Workload
from onechip.ladder.stream import Answer


@dataclass(frozen=True)
class OneSettings:
    """`at_once` is the size of the concurrent pass; `ignore_eos` False lets the model stop before `max_tokens`."""

    max_tokens: int = 256
    repeats: int = 3
    at_once: int = 4
    endpoint: Endpoint | None = None
    ignore_eos: bool = True


async def measure(bench: Bench, settings: OneSettings) -> tuple[Cell, ...]:
    """Both cells, measured now or found in the record. Raises ServerGone."""
    endpoint = await choose_endpoint(bench.client, settings.endpoint, "chat")
    wanted: dict[str, object] = {"ignore_eos": True} if settings.ignore_eos else {}
    if endpoint == "chat":
        wanted["chat_template_kwargs"] = {"enable_thinking": False}
    fields, notes = await negotiate(bench.client, endpoint, wanted)
    if settings.endpoint is None and endpoint == "completions":
        notes.append("the server takes no chat, so the texts were sent to be continued")
    fields |= {"max_tokens": settings.max_tokens, "temperature": 0}

    async def send(text: str) -> Answer:
        return await ask(bench.client, endpoint, text, **fields)

    works = [_workload(settings, endpoint, n) for n in (1, settings.at_once)]
    bench.progress.start(
        "bench one", sum(not bench.journal.has(w) for w in works) * settings.repeats
    )
    cells: list[Cell] = []
    for number, work in enumerate(works):
        if not bench.journal.has(work):
            cell = await _cell(bench, work, send, settings.repeats, tuple(notes))
            bench.journal.add(cell)
            if cell.status == "failed":
                await check_alive(bench, works[number + 1 :])
        found = bench.journal.record.cell(work)
        assert found is not None
        cells.append(found)
    return tuple(cells)


def _workload(settings: OneSettings, endpoint: Endpoint, concurrency: int) -> Workload:
    return Workload(
        kind="one", output_len=settings.max_tokens, concurrency=concurrency, endpoint=endpoint
    )


async def _cell(
    bench: Bench, work: Workload, send: load.Ask, repeats: int, notes: tuple[str, ...]
) -> Cell:
    """One untimed pass, then the timed ones; a concurrent cell sends its first prompts all together."""
    concurrency = work.concurrency or 1
    names = list(ONE)[:concurrency] if concurrency > 1 else list(ONE)
    texts = [ONE[name] for name in names]
    await load.closed(send, texts, concurrency)
    passes: list[Repeat] = []
    answers: list[Answer] = []
    with load.metered() as meter:
        for _ in range(repeats):
            answers = await load.closed(send, texts, concurrency)
            passes.append(figures.repeat_of(answers, names[: len(answers)]))
            bench.progress.step(f"{passes[-1].output_tokens} tokens in {passes[-1].wall_s:.1f} s")
    status, reason, errors = status_of(passes)
    chunks = sum(count for p in passes for _, count in p.gaps_ms)
    return Cell(
        workload=work,
        status=status,
        reason=reason,
        repeats=tuple(passes),
        figures=_figures(passes, concurrency, bench.price),
        percentiles=figures.percentiles(passes),
        errors=errors,
        client=meter.cost(chunks),
        notes=notes,
        prompts="fixed",
        texts={name: a.reasoning + a.text for name, a in zip(names, answers, strict=False) if a.ok},
    )


def _figures(passes: list[Repeat], concurrency: int, price: float | None) -> dict[str, float]:
    if concurrency > 1:
        return figures.load_figures(passes, None, price)
    return figures.one_figures(passes)


def text_equality(ours: Cell, theirs: Cell) -> dict[str, int]:
    """Of the prompts that both answered: how many, how many alike, and the median length of the common beginning."""
    names = [name for name in ours.texts if name in theirs.texts]
    prefixes = [common_prefix(ours.texts[name], theirs.texts[name]) for name in names]
    return {
        "prompts": len(names),
        "equal": sum(ours.texts[name] == theirs.texts[name] for name in names),
        "common_prefix_chars": int(stats.median(prefixes)) if prefixes else 0,
    }


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Characters or tokens that two answers share from the start."""
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same
