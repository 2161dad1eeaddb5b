"""The commands, from flags to records, against scripted servers; and what a kill in the middle leaves."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.ladder.scripted import Say, scripted

from onechip import cli
from onechip.ladder import journal
from onechip.ladder.record import Item, Record


def gsm8k_file(folder: Path, count: int = 60) -> Path:
    path = folder / "test.jsonl"
    rows = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bfcl_folder(folder: Path, count: int = 10) -> Path:
    (folder / "possible_answer").mkdir()
    parameters = {"type": "dict", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = [
        {"id": f"q{i}", "question": [[{"role": "user", "content": f"Add {i}"}]],
         "function": [{"name": "math.add", "parameters": parameters}]}
        for i in range(count)
    ]  # fmt: skip
    truth = [{"id": f"q{i}", "ground_truth": [{"math.add": {"n": [i]}}]} for i in range(count)]
    for name, rows in (("", asked), ("possible_answer/", truth)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}BFCL_v4_simple_python.json").write_text(text)
    return folder


def number_of(body: dict[str, Any]) -> int:
    content = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    digits = "".join(c for c in content.splitlines()[-1] if c.isdigit()) if content.strip() else ""
    return int(digits or -1)


def solver(body: dict[str, Any]) -> Say:
    """Wrong for every fourth."""
    number = number_of(body)
    if "tools" in body:
        return Say(calls=(("math_add", json.dumps({"n": number if number % 4 else -1})),))
    return Say(f"Answer: {number if number % 4 else -1}")


def items(record: Record) -> dict[str, tuple[bool, str, str]]:
    return {item.id: (item.right, item.verdict, item.text) for item in record.items}


def test_gsm8k_from_flags_to_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "r.json"
    with scripted(solver) as server:
        status = cli.run(
            [
                "eval",
                "gsm8k",
                server.url,
                "--data",
                str(gsm8k_file(tmp_path)),
                "--out",
                str(out),
                "-c",
                "4",
            ]
        )
    assert status == 0
    record = journal.load(out)
    (done,) = record.evals
    assert (done.task, done.status, done.figures["n"], done.figures["right"]) == (
        "gsm8k",
        "ok",
        60,
        45,
    )
    assert done.settings["thinking"] == "off"
    assert done.settings["max_tokens"] == 2048
    assert {body.get("temperature") for body in server.bodies[-60:]} == {0}
    printed = capsys.readouterr().out
    assert "0.7500" in printed
    assert str(out) in printed


def test_bfcl_from_flags_to_record(tmp_path: Path):
    out = tmp_path / "r.json"
    with scripted(solver) as server:
        status = cli.run(
            ["eval", "bfcl", server.url, "--data", str(bfcl_folder(tmp_path)), "--out", str(out)]
        )
    assert status == 0
    record = journal.load(out)
    assert record.evals[0].figures["right"] == 7
    question = server.bodies[-1]
    assert question["tool_choice"] == "auto"
    assert question["max_tokens"] == 512
    assert question["tools"][0]["function"]["name"] == "math_add"


def test_the_gate_ends_in_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "r.json"
    with scripted(lambda _: Say("I do not know")) as server:
        status = cli.run(
            ["eval", "gsm8k", server.url, "--data", str(gsm8k_file(tmp_path)), "--out", str(out)]
        )
    assert status == 1
    assert "0 of the first 50 are right" in capsys.readouterr().out
    assert len(journal.load(out).items) == 50


def test_a_server_without_chat_is_asked_to_continue_and_the_record_says_so(tmp_path: Path):
    out = tmp_path / "r.json"

    def base(body: dict[str, Any]) -> Say:
        return Say("no chat template", status=400) if "messages" in body else solver(body)

    with scripted(base) as server:
        status = cli.run(
            [
                "eval",
                "gsm8k",
                server.url,
                "--data",
                str(gsm8k_file(tmp_path)),
                "--out",
                str(out),
                "--limit",
                "5",
                "--gate",
                "0",
            ]
        )
    assert status == 0
    settings = journal.load(out).evals[0].settings
    assert (settings["endpoint"], settings["thinking"]) == ("completions", "unset")
    assert "chat_template_kwargs" not in server.bodies[-1]


def test_a_server_that_refuses_to_be_told_about_thinking_is_not_told(tmp_path: Path):
    out = tmp_path / "r.json"

    def strict(body: dict[str, Any]) -> Say:
        return Say("unknown field", status=400) if "chat_template_kwargs" in body else solver(body)

    with scripted(strict) as server:
        cli.run(
            [
                "eval",
                "gsm8k",
                server.url,
                "--data",
                str(gsm8k_file(tmp_path)),
                "--out",
                str(out),
                "--limit",
                "5",
            ]
        )
    record = journal.load(out)
    assert record.evals[0].settings["thinking"] == "unset"
    assert any("chat_template_kwargs was refused" in issue for issue in record.issues)
    assert record.evals[0].figures["errors"] == 0


def test_probes_from_flags_to_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "r.json"
    with scripted(lambda _: Say("56, and where to?")) as server:
        status = cli.run(["eval", "probes", server.url, "--group", "tools", "--out", str(out)])
    assert status == 0
    found = {p.name: p.verdict for p in journal.load(out).probes}
    assert found["restraint"] == "pass"
    assert found["parallel calls"] == "fail"
    assert "tools: parallel calls: it made 0 calls" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [["--thinking", "maybe"], ["--endpoint", "edits"], ["--data", "/none.jsonl"]]
)
def test_a_wrong_flag_is_one_line_and_status_2(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
):
    assert cli.run(["eval", "gsm8k", "http://127.0.0.1:1", "--cache", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = gsm8k_file(tmp_path)
    assert cli.run(["eval", "gsm8k", "http://127.0.0.1:1", "--data", str(data)]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_a_record_is_scored_again_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "r.json"
    with scripted(solver) as server:
        cli.run(
            ["eval", "gsm8k", server.url, "--data", str(gsm8k_file(tmp_path)), "--out", str(out)]
        )
    old = journal.load(out)
    spoiled = [item if item.id != "3" else spoil(item) for item in old.items]
    journal.write_record(out, journal.records.msgspec.structs.replace(old, items=tuple(spoiled)))
    assert cli.run(["eval", "rescore", str(out), "--out", str(tmp_path / "new.json")]) == 0
    printed = capsys.readouterr().out
    assert "gsm8k 3: wrong_value -> right (3)" in printed
    assert "1 of 60 verdicts changed" in printed
    assert journal.load(tmp_path / "new.json").items == old.items


def spoil(item: Item) -> Item:
    return journal.records.msgspec.structs.replace(item, right=False, verdict="wrong_value")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_is_killed_in_the_middle_goes_on_and_equals_one_that_was_not(
    tmp_path: Path, number: signal.Signals
):
    data, out = gsm8k_file(tmp_path), tmp_path / "r.json"

    def slow(body: dict[str, Any]) -> Say:
        return Say(solver(body).text, delay=0.02)

    with scripted(slow) as server:
        words = ["eval", "gsm8k", server.url, "--data", str(data), "-c", "2"]
        client = subprocess.Popen(
            [sys.executable, "-m", "onechip.cli", *words, "--out", str(out)],
            stderr=subprocess.DEVNULL,
        )
        wait_for_lines(journal.records.journal_path(out), 25)
        client.send_signal(number)
        assert client.wait(20) == (-9 if number == signal.SIGKILL else 130)
        kept = journal.load(out)
        assert 20 <= len(kept.items) < 60
        assert kept.evals[0].status == "missing"
        asked = len(server.bodies)
        assert cli.run([*words, "--out", str(out), "--resume"]) == 0
        assert (
            len(server.bodies) - asked <= 60 - len(kept.items) + 2
        )  # two to learn what the server takes
        assert cli.run([*words, "--out", str(tmp_path / "whole.json")]) == 0
    resumed, whole = journal.load(out), journal.load(tmp_path / "whole.json")
    assert items(resumed) == items(whole)
    for name in ("n", "right", "accuracy", "errors", "truncated"):
        assert resumed.evals[0].figures[name] == whole.evals[0].figures[name]


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_shipped_arms_are_listed_with_their_settings(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["ladder", "arms"]) == 0
    printed = capsys.readouterr().out
    assert "vllm-tpu\n" in printed
    assert "--set model (required), port" in printed
