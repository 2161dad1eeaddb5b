"""A ladder over real processes: each arm is started once, measured, stopped and recorded, whatever becomes of it."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onechip import cli
from onechip.ladder import journal
from onechip.ladder.record import Record

STUB = Path(__file__).with_name("arm_stub.py")


def arm(folder: Path, name: str, *flags: str, extra: str = "") -> str:
    words = json.dumps(["${python}", str(STUB), "${port}", *flags])
    path = folder / f"{name}.toml"
    path.write_text(f"""
schema = 1
about = "a stub, run here"
needs = "It needs nothing."
[settings]
port = "free"
[start]
command = {words}
ready_s = 20
[server]
url = "http://127.0.0.1:${{port}}"
[stop]
grace_s = 1
[record]
engine = "stub"
weights = "none"
[record.commands]
version = ["echo", "1.5"]
digest = ["echo", "sha256:abc"]
model_digest = ["echo", "f00 file"]
python = ["echo", "3"]
{extra}
""")
    return str(path)


def questions(folder: Path, count: int = 12) -> list[str]:
    path = folder / "test.jsonl"
    rows = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--jobs", "gsm8k", "--gsm8k-data", str(path), "--out", str(folder / "out")]


def record(folder: Path, name: str) -> Record:
    return journal.load(folder / "out" / f"{name}.json")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_every_arm_has_its_turn_and_its_record(tmp_path: Path):
    arms = [arm(tmp_path, "first", "--delay", "0.3"), arm(tmp_path, "second")]
    assert cli.run(["ladder", "run", *arms, *questions(tmp_path)]) == 0
    for name in ("first", "second"):
        found = record(tmp_path, name)
        assert (found.run.arm, found.run.status) == (name, "done")
        assert (found.software.engine, found.software.version) == ("stub", "1.5")
        assert (found.software.image_digest, found.software.packages) == (
            "sha256:abc",
            {"python": "3"},
        )
        assert found.model.digest == "f00"
        assert found.software.serve_args[1].endswith("arm_stub.py")
        assert (found.model.id, found.model.weights, found.model.max_model_len) == (
            "scripted",
            "none",
            4096,
        )
        assert found.evals[0].figures["right"] == 12
        assert found.memory is not None
        assert found.memory.host_rss_gib is not None
        assert 0.001 < found.memory.host_rss_gib < 1
        assert found.startup is not None
        assert found.startup.healthy_s is not None
        assert found.startup.first_answer_s is not None
        assert 0 < found.startup.healthy_s < found.startup.first_answer_s < 20
    first = record(tmp_path, "first").startup
    assert first is not None
    assert first.healthy_s is not None
    assert first.healthy_s > 0.3
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "first.json", "first.log", "second.json", "second.log",
    ]  # fmt: skip


def test_an_arm_that_does_not_start_is_recorded_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arms = [arm(tmp_path, "broken", "--die"), arm(tmp_path, "good")]
    assert cli.run(["ladder", "run", *arms, *questions(tmp_path)]) == 1
    broken = record(tmp_path, "broken")
    assert broken.run.status == "failed"
    assert "no such model: gemma" in broken.issues[0]
    assert record(tmp_path, "good").run.status == "done"
    assert "broken: broken: ended with status 3" in capsys.readouterr().err


def test_an_arm_that_never_came_up_can_be_tried_again(tmp_path: Path):
    flags = questions(tmp_path)
    assert cli.run(["ladder", "run", arm(tmp_path, "a", "--die"), *flags]) == 1
    assert cli.run(["ladder", "run", arm(tmp_path, "a"), *flags]) == 0
    assert record(tmp_path, "a").issues == ()


def test_a_server_that_dies_in_a_job_leaves_what_was_measured_and_the_next_arm_runs(tmp_path: Path):
    arms = [arm(tmp_path, "mortal", "--die-after", "8"), arm(tmp_path, "good")]
    flags = questions(tmp_path, 40)
    flags[1] = "gsm8k,probes"
    assert cli.run(["ladder", "run", arms[0], *flags]) == 1
    mortal = record(tmp_path, "mortal")
    assert mortal.evals[0].status == "failed"
    assert mortal.evals[0].reason is not None
    assert "20 requests in a row failed" in mortal.evals[0].reason
    assert (
        sum(item.right for item in mortal.items) == 5
    )  # eight, less the first answer and two trials
    text = "\n".join(mortal.issues)
    assert "gsm8k: the server ended with status 9" in text
    assert "probes: not measured, the server ended with status 9" in text
    assert "out of memory" in text
    assert mortal.probes == ()


def test_records_are_not_overwritten_and_nothing_is_started_for_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arms = [arm(tmp_path, "a"), arm(tmp_path, "b")]
    flags = questions(tmp_path)
    assert cli.run(["ladder", "run", arms[1], *flags]) == 0
    assert cli.run(["ladder", "run", *arms, *flags]) == 2
    assert "add --resume" in capsys.readouterr().err
    assert not (tmp_path / "out" / "a.log").exists()
    assert cli.run(["ladder", "run", *arms, *flags, "--resume"]) == 0


def test_settings_go_to_the_arms_that_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    port = free_port()
    arms = [arm(tmp_path, "a"), arm(tmp_path, "b")]
    assert cli.run(["ladder", "run", *arms, *questions(tmp_path), "--set", f"b.port={port}"]) == 0
    assert str(port) in record(tmp_path, "b").software.serve_args
    assert str(port) not in record(tmp_path, "a").software.serve_args
    assert cli.run(["ladder", "run", *arms, "--set", "modle=x"]) == 2
    assert "no arm of" in capsys.readouterr().err
    assert cli.run(["ladder", "run", *arms, "--set", "port"]) == 2
    assert cli.run(["ladder", "run", *arms, "--jobs", "two"]) == 2
    assert cli.run(["ladder", "run", arms[0], arms[0], *questions(tmp_path), "--resume"]) == 2


# As a script starts `command &`: Ctrl-C is not for it.
BACKGROUND = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")


@pytest.mark.parametrize(
    ("number", "shell"),
    [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGTERM, BACKGROUND)],
)
def test_an_interrupted_ladder_stops_its_server_and_closes_its_record(
    tmp_path: Path, number: signal.Signals, shell: tuple[str, ...]
):
    port, child = free_port(), tmp_path / "child"
    first = arm(tmp_path, "a", "--slow", "0.1", "--stubborn", "--child", str(child))
    words = [
        "ladder",
        "run",
        first,
        arm(tmp_path, "b"),
        *questions(tmp_path, 200),
        "--set",
        f"a.port={port}",
    ]
    client = subprocess.Popen(
        [*shell, sys.executable, "-m", "onechip.cli", *words], stderr=subprocess.DEVNULL
    )
    partial = journal.records.journal_path(tmp_path / "out" / "a.json")
    deadline = time.monotonic() + 30
    while not partial.exists() or partial.read_bytes().count(b"\n") < 6:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    client.send_signal(number)
    assert client.wait(30) == 130
    assert not listens(port)
    assert (
        not Path(f"/proc/{child.read_text()}").exists()
        or "Z" in Path(f"/proc/{child.read_text()}/stat").read_text()
    )
    found = record(tmp_path, "a")
    assert found.run.status == "interrupted"
    assert len(found.items) >= 3
    assert not (tmp_path / "out" / "b.json").exists()


def test_a_server_of_somebody_elses_is_measured_and_left_running(tmp_path: Path):
    port = free_port()
    other = subprocess.Popen([sys.executable, str(STUB), str(port)])
    try:
        deadline = time.monotonic() + 20
        while not listens(port):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        url = f"url=http://127.0.0.1:{port}"
        assert cli.run(["ladder", "run", "url", "--set", url, *questions(tmp_path)]) == 0
        found = record(tmp_path, "url")
        assert found.evals[0].figures["right"] == 12
        assert found.startup is None or found.startup.first_answer_s is None
        assert listens(port)
    finally:
        other.kill()
        other.wait()


def test_a_report_reads_what_a_ladder_wrote(tmp_path: Path):
    arms = [arm(tmp_path, "first"), arm(tmp_path, "broken", "--die")]
    assert cli.run(["ladder", "run", *arms, *questions(tmp_path)]) == 1
    records = [str(tmp_path / "out" / f"{name}.json") for name in ("first", "broken")]
    assert cli.run(["report", *records, "--no-plots", "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Evals: first" in text
    assert "1.0000" in text
    assert "no such model: gemma" in text
