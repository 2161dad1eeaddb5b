"""A measured server's life, with a real process: nothing it does leaves anything behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from onechip.errors import ArmFailed
from onechip.ladder import process
from onechip.ladder.arm import Arm, Start, Stop

STUB = Path(__file__).with_name("arm_stub.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def arm(
    *flags: str, ready_s: float = 20, grace_s: float = 5, stop: tuple[str, ...] = (), port: int = 0
) -> Arm:
    port = port or free_port()
    start = Start((sys.executable, str(STUB), str(port), *flags), {"STUB": "1"}, ready_s)
    return Arm(
        name="stub", about="", needs="It needs nothing.", url=f"http://127.0.0.1:{port}", health="/health", model="",
        request={}, start=start, stop=Stop(signal.SIGTERM, grace_s, stop), engine="stub", weights="",
        kv_cache_dtype="", commands={},
    )  # fmt: skip


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_slow_server_is_waited_for_and_its_seconds_counted(tmp_path: Path):
    found = arm("--delay", "0.6")
    with process.started(found, tmp_path / "log", os.environ) as running:
        assert running.healthy_s is not None
        assert 0.6 <= running.healthy_s < 15
        assert listens(found.url)
    assert not listens(found.url)
    assert (tmp_path / "log").read_text() == "loading\n"


def test_a_server_that_dies_is_reported_with_its_status_its_last_words_and_its_needs(
    tmp_path: Path,
):
    with (
        pytest.raises(ArmFailed, match=r"status 3.*It needs nothing.*no such model: gemma"),
        process.started(arm("--die"), tmp_path / "log", os.environ),
    ):
        pytest.fail("it never answered")


def test_a_server_that_is_late_is_stopped(tmp_path: Path):
    found = arm("--delay", "30", ready_s=0.5)
    with (
        pytest.raises(ArmFailed, match=r"start.ready_s = 0.5"),
        process.started(found, tmp_path / "log", os.environ),
    ):
        pytest.fail("it never answered")
    assert not listens(found.url)


def test_a_command_that_does_not_exist_is_named_with_what_is_needed(tmp_path: Path):
    found = arm()
    broken = Arm(**{**vars(found), "start": Start(("no-such-server",), {}, 5)})
    with (
        pytest.raises(ArmFailed, match=r"no-such-server could not be started.*It needs nothing"),
        process.started(broken, tmp_path / "log", os.environ),
    ):
        pass


@pytest.mark.parametrize("flags", [(), ("--stubborn",)], ids=["polite", "ignores SIGTERM"])
def test_the_whole_group_is_gone_after_the_block(tmp_path: Path, flags: tuple[str, ...]):
    child = tmp_path / "child"
    found = arm(*flags, "--child", str(child), grace_s=0.5)
    with process.started(found, tmp_path / "log", os.environ) as running:
        worker = int(child.read_text())
        assert running.pid is not None
        assert runs(worker)
    assert not runs(worker)
    assert not runs(running.pid)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_it_is_stopped_whatever_the_block_raises(tmp_path: Path, error: type[BaseException]):
    found = arm()
    with pytest.raises(error), process.started(found, tmp_path / "log", os.environ):
        raise error
    assert not listens(found.url)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        found = arm(port=other.getsockname()[1])
        with (
            pytest.raises(ArmFailed, match="--set port=N"),
            process.started(found, tmp_path / "log", os.environ),
        ):
            pass
    assert not (tmp_path / "log").exists()


def test_the_stop_command_runs_after_the_group_is_gone(tmp_path: Path):
    mark = tmp_path / "stopped"
    with process.started(arm(stop=("touch", str(mark))), tmp_path / "log", os.environ):
        assert not mark.exists()
    assert mark.exists()


def test_a_server_of_somebody_else_is_neither_started_nor_stopped(tmp_path: Path):
    port = free_port()
    other = subprocess.Popen([sys.executable, str(STUB), str(port)])
    try:
        found = Arm(**{**vars(arm(port=port)), "start": None})
        with process.started(found, tmp_path / "log", os.environ) as running:
            assert running.pid is None
        assert listens(found.url)
    finally:
        other.kill()
        other.wait()


def test_a_second_interrupt_during_the_grace_period_kills_at_once(tmp_path: Path):
    child = tmp_path / "child"
    found = arm("--stubborn", "--child", str(child), grace_s=60)
    script = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(STUB.parent)!r})
from test_process import arm, process
with process.started(arm("--stubborn", "--child", {str(child)!r}, grace_s=60, port={found.url.rpartition(":")[2]}),
                     Path({str(tmp_path / "log")!r}), os.environ):
    print("up", flush=True)
    time.sleep(60)
"""
    client = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"up\n"
    client.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert client.poll() is None  # waiting for the stubborn one
    client.send_signal(signal.SIGINT)
    client.wait(20)
    client.stdout.close()
    assert not runs(int(child.read_text()))
    assert not listens(found.url)


def test_what_a_command_prints_is_kept_and_what_fails_says_so():
    commands: Mapping[str, tuple[str, ...]] = {
        "good": (sys.executable, "-c", "print(' 1.2 ')"),
        "bad": (sys.executable, "-c", "import sys; sys.exit('broken')"),
        "none": ("no-such-command",),
    }
    found = process.outputs(commands, os.environ)
    assert found["good"] == "1.2"
    assert found["bad"].startswith("not known: status 1: broken")
    assert found["none"].startswith("not known: ")
