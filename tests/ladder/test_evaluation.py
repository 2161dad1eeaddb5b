"""An eval's answers survive everything and add up to the same totals, whatever happened on the way."""

import asyncio
import errno
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from onechip.errors import ConfigError
from onechip.ladder import evaluation, gsm8k, journal, tasks
from onechip.ladder.evaluation import Plan
from onechip.ladder.journal import Journal, open_run
from onechip.ladder.progress import Silent
from onechip.ladder.record import Eval, Hardware, Item, Model, Record, RecordError, Software
from onechip.ladder.stream import Answer, Failure, ToolCall, Usage
from onechip.ladder.tasks import Question, Task

Reply = Callable[[Question], Answer]


def task(count: int = 60, **settings: Any) -> Task:
    """Question i asks for i."""
    questions = [gsm8k.Question(str(i), f"What is {i}?", Fraction(i)) for i in range(count)]
    return tasks.gsm8k_task(questions, "digest", **settings)


def said(text: str, finish: str = "stop") -> Answer:
    return Answer(sent=1.0, finish=1.5, text=text, finish_reason=finish, usage=Usage(10, 5))


def failed(message: str = "refused") -> Answer:
    return Answer(sent=1.0, error=Failure("connect", message))


def mixed(question: Question) -> Answer:
    """Two of three are right; every tenth is cut."""
    number = int(question.id)
    answer = number if number % 3 else number + 1
    return said(f"So.\nAnswer: {answer}", "length" if number % 10 == 0 else "stop")


def ask_with(reply: Reply, asked: list[str] | None = None) -> evaluation.Ask:
    async def ask(question: Question, max_tokens: int) -> Answer:
        if asked is not None:
            asked.append(question.id)
        await asyncio.sleep(0)
        return reply(question)

    return ask


def header() -> Any:
    return journal.new_header(Model(id="m"), Software(engine="e", version="1"), Hardware())


def evaluate(
    path: Path, reply: Reply, *, resume: bool = False, asked: list[str] | None = None,
    of: Task | None = None, plan: Plan | None = None,
) -> tuple[Eval, Record]:  # fmt: skip
    with open_run(path, header(), resume=resume) as run:
        done = asyncio.run(
            evaluation.run(
                of or task(), ask_with(reply, asked), run, plan or Plan(gate=0), Silent()
            )
        )
        return done, run.record


def by_id(record: Record) -> dict[str, Item]:
    return {item.id: item for item in record.items}


def without_time(figures: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name != "wall_s"}


@pytest.mark.parametrize("concurrency", [1, 4, 100])
def test_the_totals_do_not_depend_on_how_many_are_asked_at_once(tmp_path: Path, concurrency: int):
    asked: list[str] = []
    done, record = evaluate(tmp_path / "r.json", mixed, asked=asked, plan=Plan(concurrency, gate=0))
    assert done.status == "ok"
    assert without_time(done.figures) == {
        "n": 60, "right": 40, "accuracy": 40 / 60, "errors": 0, "truncated": 6,
        "concurrency": concurrency, "questions": 60,
    }  # fmt: skip
    assert sorted(asked, key=int) == [str(i) for i in range(60)]
    assert sum(item.right for item in record.items) == 40


def test_every_answer_is_kept_as_it_came(tmp_path: Path):
    _, record = evaluate(tmp_path / "r.json", mixed)
    item = by_id(record)["3"]
    assert (item.text, item.expected, item.got, item.verdict) == (
        "So.\nAnswer: 4",
        "3",
        "4",
        "wrong_value",
    )
    assert (item.prompt_tokens, item.output_tokens, item.latency_s) == (10, 5, 0.5)
    assert item.finish_reason == "stop"


def test_a_low_first_fifty_stops_the_run_and_says_so(tmp_path: Path):
    asked: list[str] = []
    done, _ = evaluate(
        tmp_path / "r.json", lambda q: said("Answer: -1"), asked=asked, plan=Plan(gate=0.5)
    )
    assert len(asked) == 50
    assert done.status == "failed"
    assert done.reason is not None
    assert "0 of the first 50 are right (0.000), below --gate 0.5" in done.reason
    assert "10 of 60 questions were not asked" in done.reason


def test_the_gate_lets_a_good_run_through(tmp_path: Path):
    done, _ = evaluate(tmp_path / "r.json", mixed, plan=Plan(gate=0.66))
    assert done.status == "ok"


def test_a_limit_below_the_gate_still_has_a_gate(tmp_path: Path):
    done, _ = evaluate(tmp_path / "r.json", lambda q: said("?"), of=task(5), plan=Plan(gate=0.5))
    assert done.reason is not None
    assert "first 5" in done.reason


@pytest.mark.parametrize("broken_at", [0, 1, 30, 55])
def test_a_run_that_broke_off_goes_on_and_equals_one_that_did_not(tmp_path: Path, broken_at: int):
    def breaks(question: Question) -> Answer:
        if question.id == str(broken_at):
            raise KeyboardInterrupt
        return mixed(question)

    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "broken.json", breaks)
    asked: list[str] = []
    done, record = evaluate(tmp_path / "broken.json", mixed, resume=True, asked=asked)
    whole, reference = evaluate(tmp_path / "whole.json", mixed)
    assert asked == [str(i) for i in range(broken_at, 60)]
    assert by_id(record) == by_id(reference)
    assert without_time(done.figures) == without_time(whole.figures)
    assert record.evals[0].status == "ok"


def test_what_failed_is_asked_again_and_counts_as_wrong_until_then(tmp_path: Path):
    done, record = evaluate(tmp_path / "r.json", lambda q: failed() if q.id == "7" else mixed(q))
    assert (done.status, done.figures["errors"], done.figures["right"]) == ("failed", 1, 39)
    assert by_id(record)["7"].verdict == "error"
    asked: list[str] = []
    done, _ = evaluate(tmp_path / "r.json", mixed, resume=True, asked=asked)
    assert (done.status, done.figures["right"], asked) == ("ok", 40, ["7"])


def test_a_server_that_is_gone_ends_the_run_early(tmp_path: Path):
    asked: list[str] = []
    done, _ = evaluate(
        tmp_path / "r.json",
        lambda q: mixed(q) if int(q.id) < 10 else failed("no route"),
        asked=asked,
    )
    assert len(asked) == 10 + evaluation.FAILURES_IN_A_ROW
    assert done.status == "failed"
    assert done.reason is not None
    assert "20 requests in a row failed, the last with 'no route'" in done.reason
    assert "30 of 60 questions were not asked" in done.reason


def test_a_full_disk_keeps_what_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = Journal.add
    written = 0

    def full(self: Journal, entry: Any) -> None:
        nonlocal written
        written += 1
        if written > 20:
            monkeypatch.setattr(os, "fsync", fails)
        original(self, entry)

    def fails(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "add", full)
    with pytest.raises(RecordError, match="No space left on device"):
        evaluate(tmp_path / "r.json", mixed, plan=Plan(4, gate=0))
    monkeypatch.undo()
    kept = journal.load(tmp_path / "r.json")
    assert len(kept.items) == 19  # twenty entries, the first of which is the unfinished Eval
    assert kept.evals[0].status == "missing"
    done, record = evaluate(tmp_path / "r.json", mixed, resume=True)
    assert (done.status, len(record.items), done.figures["right"]) == ("ok", 60, 40)


def test_answers_under_other_settings_are_not_mixed(tmp_path: Path):
    evaluate(tmp_path / "r.json", mixed)
    with pytest.raises(ConfigError, match="max_tokens"):
        evaluate(tmp_path / "r.json", mixed, resume=True, of=task(max_tokens=100))


def test_a_record_is_scored_again_without_a_server(tmp_path: Path):
    done, record = evaluate(tmp_path / "r.json", mixed)
    again, changed = evaluation.rescored(record)
    assert changed == []
    assert without_time(again.evals[0].figures) == without_time(done.figures)
    spoiled = evaluation.replace(
        record,
        items=tuple(
            evaluation.replace(i, right=False, verdict="?", got=None) for i in record.items
        ),
    )
    again, changed = evaluation.rescored(spoiled)
    assert again.items == record.items
    assert len(changed) == 60
    assert again.evals[0].figures["accuracy"] == done.figures["accuracy"]


def test_bfcl_answers_are_scored_from_the_record_alone():
    function = {
        "name": "math.add",
        "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    expected = {"functions": [function], "truth": [{"math.add": {"a": [1]}}]}
    call = {"name": "math_add", "arguments": '{"a": 1}'}
    item = Item(task="bfcl", id="0", right=False, verdict="", expected=expected, tool_calls=(call,))
    assert tasks.score(item).right
    wrong = tasks.score(evaluation.replace(item, tool_calls=({**call, "arguments": '{"a": 2}'},)))
    assert (wrong.right, wrong.verdict) == (False, "wrong_value")


def test_an_unknown_task_is_named():
    with pytest.raises(ConfigError, match="gsm8k, bfcl"):
        tasks.score(Item(task="mmlu", id="0", right=False, verdict=""))


def test_what_goes_over_the_wire():
    question = task(1).questions[0]
    assert question.messages[0]["content"].startswith(gsm8k.INSTRUCTION)
    assert question.fields == {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    assert task(1, thinking="on").questions[0].fields["chat_template_kwargs"] == {
        "enable_thinking": True
    }
    assert task(1, thinking="unset").questions[0].fields == {"temperature": 0}
    plain = task(1, endpoint="completions").questions[0]
    assert plain.prompt is not None
    assert plain.fields == {"temperature": 0}


def test_calls_are_kept_by_name_and_arguments():
    answer = Answer(
        sent=0.0, finish=1.0, tool_calls=(ToolCall("1", "f", "{}"),), finish_reason="tool_calls"
    )
    item = evaluation.item_of("bfcl", Question("0", (), None, {}, None), answer)
    assert item.tool_calls == ({"name": "f", "arguments": "{}"},)
