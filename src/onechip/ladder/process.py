"""The life of a measured server: launched, watched until it answers, stopped whatever happens.

Owns processes, their log and the seconds they take; refuses to know what is asked of them in between.

1. The port must be free: whoever answers there is not the server that is about to be measured.
2. Launch in a process group of its own, output to a log file, and poll the health URL; a server that dies or is late
   ends the arm with the end of its log and what it needs.
3. While the caller works, the group runs.
4. At the end - a return, an exception, Ctrl-C, SIGTERM (the ladder turns it into an exception) - signal the group, wait
   the grace period, kill what is left, run the arm's own stop command, and make sure that neither a process of the
   group nor anybody on the port is left. Ctrl-C during the grace period kills at once.

A child that leaves the group and the port is beyond reach; containers are such, and are what `stop.command` is for.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from onechip.errors import ArmFailed
from onechip.ladder.arm import Arm, Start

POLL_S = 0.05
KILL_S = 10.0  # a killed process is gone in milliseconds, unless a driver holds it
COMMAND_S = 60.0
LOG_LINES = 12


@dataclass(frozen=True)
class Running:
    """A server that answers its health URL. `launched` is on the monotonic clock; None where we did not launch it."""

    arm: Arm
    launched: float | None
    healthy_s: float | None
    pid: int | None
    log: Path | None
    process: subprocess.Popen[bytes] | None = None

    def death(self) -> str | None:
        """How the server ended, where it did; None while it runs or is somebody else's."""
        if self.process is None or self.process.poll() is None:
            return None
        return f"ended with status {self.process.returncode}; the end of {self.log}: {log_end(self.log)}"

    def resident_gib(self) -> float | None:
        """Host memory of the whole group, pages that processes share counted once; None where /proc does not say."""
        if self.pid is None:
            return None
        found = [_resident_kib(stat.parent) for stat in _group(self.pid)]
        known = [kib for kib in found if kib is not None]
        return round(sum(known) / 2**20, 3) if known else None


@contextmanager
def started(arm: Arm, log: Path, environment: Mapping[str, str]) -> Generator[Running]:
    """Run the arm's server until the block ends. Raises ArmFailed when it does not come up or does not go."""
    if arm.start is None:
        _wait_until_healthy(arm, None, None, time.monotonic() + 10)
        yield Running(arm, None, None, None, None)
        return
    _refuse_used_port(arm)
    launched = time.monotonic()
    process = _launch(arm, arm.start, log, environment)
    try:
        _wait_until_healthy(arm, process, log, launched + arm.start.ready_s)
        healthy = time.monotonic() - launched
        yield Running(arm, launched, healthy, process.pid, log, process)
    finally:
        _stop(arm, process, environment)


def log_end(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    return " | ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def outputs(
    commands: Mapping[str, tuple[str, ...]], environment: Mapping[str, str]
) -> dict[str, str]:
    """What each command prints, for the record; a command that fails says so instead."""
    return {name: _output(words, environment) for name, words in commands.items()}


def _output(words: tuple[str, ...], environment: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env=dict(environment),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    if done.returncode:
        return f"not known: status {done.returncode}: {done.stderr.strip()[-200:]}"
    return done.stdout.strip() or done.stderr.strip()  # llama.cpp tells its version on stderr


def _launch(
    arm: Arm, start: Start, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        with log.open("wb") as output:
            return subprocess.Popen(
                start.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment, **start.environment},
                start_new_session=True,
            )
    except OSError as error:
        raise ArmFailed(
            f"{arm.name}: {start.command[0]} could not be started: {error}. {arm.needs}"
        ) from error


def _refuse_used_port(arm: Arm) -> None:
    if _answers(arm):
        raise ArmFailed(
            f"{arm.name}: somebody already listens on {arm.url}; "
            "end that server, or give another port with --set port=N"
        )


def _answers(arm: Arm) -> bool:
    parts = urlsplit(arm.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError), socket.create_connection((parts.hostname or "", port), 2):
        return True
    return False


def _wait_until_healthy(
    arm: Arm, process: subprocess.Popen[bytes] | None, log: Path | None, deadline: float
) -> None:
    while not _healthy(arm):
        if process is not None and process.poll() is not None:
            raise ArmFailed(
                f"{arm.name}: ended with status {process.returncode} before it answered. {arm.needs} "
                f"The end of {log}: {log_end(log)}"
            )
        if time.monotonic() > deadline:
            late = (
                f"start.ready_s = {arm.start.ready_s:g} was not enough"
                if arm.start
                else "is it running?"
            )
            raise ArmFailed(
                f"{arm.name}: no healthy answer from {arm.url}{arm.health}; {late}. {log_end(log)}"
            )
        time.sleep(POLL_S)


def _healthy(arm: Arm) -> bool:
    if not arm.health:
        return _answers(arm)
    try:
        with urllib.request.urlopen(arm.url + arm.health, timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _stop(arm: Arm, process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    try:
        _signal(process.pid, arm.stop.signal)
        _wait_until_gone(process, arm.stop.grace_s)
    finally:
        # Also the way of an impatient second Ctrl-C.
        _signal(process.pid, signal.SIGKILL)
        gone = _wait_until_gone(process, KILL_S)
        if arm.stop.command:
            _output(arm.stop.command, environment)
    if not gone or _answers(arm):
        raise ArmFailed(
            f"{arm.name}: still there after SIGKILL to group {process.pid}; "
            f"whoever listens on {arm.url} must be ended by hand"
        )


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _wait_until_gone(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether every process of the group ended in time; reaps the leader."""
    deadline = time.monotonic() + seconds
    while process.poll() is None or _alive(process.pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _alive(group: int) -> bool:
    """Whether a process of the group still runs. Dead ones that nobody reaps do not count, where /proc tells."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if not Path("/proc/self/stat").exists():
        return True
    return bool(_group(group))


def _group(group: int) -> list[Path]:
    """/proc/PID/stat of the processes of a group that still run."""
    return [stat for stat in Path("/proc").glob("[0-9]*/stat") if _runs_in(group, stat)]


def _resident_kib(process: Path) -> int | None:
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)


def _runs_in(group: int, stat: Path) -> bool:
    try:
        state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(found) == group and state not in "ZX"
