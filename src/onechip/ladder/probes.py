"""Capability probes: one question each that a capable server and model answer in a known way.

Owns what a probe is, how a verdict is reached, and the run over all of them; what is asked lies in `probe_tools`,
`probe_schemas` and `probe_text`.

A verdict is one of four. `pass`: the answer has the wanted property. `fail`: an answer came without it; a field that a
server silently ignores ends here, since a user would be misled. `unsupported`: the server refused the request as such
(400, 404, 405, 415, 422 or 501), or cannot take it by its own limits. `error`: no answer for another reason.

Every probe is greedy. Each says what was seen, and its answer goes into the record, so a reader can disagree.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onechip.ladder import record
from onechip.ladder.client import Client
from onechip.ladder.journal import Journal
from onechip.ladder.progress import Progress
from onechip.ladder.record import Verdict
from onechip.ladder.stream import Answer

REFUSALS = frozenset((400, 404, 405, 415, 422, 501))
MARKERS = (
    "<|channel",
    "<channel|",
    "<|tool_call",
    "<tool_call|",
    "<|turn",
    "<turn|",
    "<think>",
    "</think>",
)
SHOWN = 160  # characters of an answer that a detail quotes

Message = Mapping[str, Any]
Check = Callable[[Answer], str | None]


@dataclass(frozen=True)
class Finding:
    """What one probe saw; `answer` is the last answer that decided."""

    verdict: Verdict
    detail: str
    answer: Answer | None = None


@dataclass(frozen=True)
class Probe:
    """`run` asks the server and decides; `max_model_len` is what the server says it takes, if it says."""

    domain: str
    name: str
    run: Callable[[Client, int | None], Awaitable[Finding]]


def once(domain: str, name: str, messages: Sequence[Message], check: Check, **fields: Any) -> Probe:
    """A probe of one chat request. `check` says what is wrong with the answer, or None.

    A short server is asked for no more than half its length, so that it is not refused for want of room.
    """

    async def run(client: Client, max_model_len: int | None) -> Finding:
        room = min(fields["max_tokens"], (max_model_len or 2**31) // 2)
        asked = {**fields, "max_tokens": room}
        return judged(await client.chat(messages, temperature=0, **asked), check)

    return Probe(domain, name, run)


def judged(answer: Answer, check: Check) -> Finding:
    """The verdict on an answer, whatever became of it."""
    if answer.error is not None:
        return Finding(refusal_or_error(answer), answer.error.message, answer)
    wrong = check(answer)
    if wrong is None:
        return Finding("pass", seen(answer), answer)
    return Finding("fail", f"{wrong}; it said: {seen(answer)}", answer)


def refusal_or_error(answer: Answer) -> Verdict:
    assert answer.error is not None
    refused = answer.error.kind == "status" and answer.error.status in REFUSALS
    return "unsupported" if refused else "error"


def seen(answer: Answer) -> str:
    """The answer in a line."""
    calls = [f"{call.name}({call.arguments})" for call in answer.tool_calls]
    parts = [*calls, answer.text.strip()]
    line = " ".join(" ".join(part for part in parts if part).split())
    return line if len(line) <= SHOWN else line[:SHOWN] + "..."


def first_wrong(*complaints: str | None) -> str | None:
    """The first of several complaints, or None where there is none."""
    return next((each for each in complaints if each is not None), None)


def not_cut(answer: Answer) -> str | None:
    return "the answer was cut by max_tokens" if answer.finish_reason == "length" else None


def no_markers(answer: Answer) -> str | None:
    """Control tokens of the dialect must never reach a user as text."""
    found = [mark for mark in MARKERS if mark in answer.text]
    return f"control text {found[0]!r} is in the content" if found else None


def no_calls(answer: Answer) -> str | None:
    return "it called a tool" if answer.tool_calls else None


def contains(*words: str) -> Check:
    """Every word is in the text, whatever its case."""

    def check(answer: Answer) -> str | None:
        missing = [word for word in words if word.lower() not in answer.text.lower()]
        return f"{', '.join(missing)} is not in the text" if missing else None

    return check


async def run_all(
    probes: Iterable[Probe],
    client: Client,
    max_model_len: int | None,
    journal: Journal,
    progress: Progress,
) -> None:
    """Run each probe that has no verdict on record yet (an error is worth another try) and record it."""
    known = {
        (entry.domain, entry.name)
        for entry in journal.entries
        if isinstance(entry, record.Probe) and entry.verdict != "error"
    }
    left = [probe for probe in probes if (probe.domain, probe.name) not in known]
    progress.start("probes", len(left))
    for probe in left:
        found = await probe.run(client, max_model_len)
        journal.add(entry(probe, found))
        progress.step(f"{probe.name}: {found.verdict}")


def entry(probe: Probe, found: Finding) -> record.Probe:
    """A finding as the record keeps it."""
    answer = found.answer
    timed = answer is not None and answer.finish is not None
    return record.Probe(
        domain=probe.domain,
        name=probe.name,
        verdict=found.verdict,
        detail=found.detail,
        latency_s=answer.finish - answer.sent if timed and answer and answer.finish else None,
        answer=_kept(answer) if answer else {},
    )


def _kept(answer: Answer) -> dict[str, Any]:
    kept = {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in answer.tool_calls],
        "finish_reason": answer.finish_reason,
    }
    return {name: value for name, value in kept.items() if value}
