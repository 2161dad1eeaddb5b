"""What start-up shows: bars on a terminal, nothing and no rich elsewhere, and only our own log lines."""

import os
import pty
import subprocess
import sys

SHOW = """
import sys
from onechip.engine.progress import shown
with shown() as report:
    if report.loading and report.compiling:
        report.loading(3_000_000_000, 9_000_000_000)
        report.compiling(2, 10, "64 tokens, 4 rows")
        report.compiling(10, 10, "")
print("rich" in sys.modules, "jax" in sys.modules)
"""
LOG = """
import logging
from onechip.engine.progress import log_to_stderr
log_to_stderr()
logging.getLogger("jax._src.xla_bridge").info("noise")
logging.getLogger("jax._src.xla_bridge").warning("trouble")
logging.getLogger("onechip.engine").info("news")
"""


def run(script: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True, env=environment
    )


def test_bars_are_drawn_on_a_terminal():
    ours, theirs = pty.openpty()
    try:
        assert run(SHOW, theirs).stdout.split() == ["True", "False"]
        drawn = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    for words in ("weights", "3.00 of 9.00 GB", "programs", "10 of 10"):
        assert words in drawn


def test_without_a_terminal_nothing_is_drawn():
    done = run(SHOW)
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr == ""


def test_others_are_heard_from_warnings_on():
    lines = run(LOG).stderr.splitlines()
    assert lines == ["jax._src.xla_bridge: trouble", "onechip.engine: news"]
