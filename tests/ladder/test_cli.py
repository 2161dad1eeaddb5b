"""The commands start at once, without jax or a plot, and refuse what makes no sense."""

import subprocess
import sys

import pytest

from onechip import cli
from onechip.errors import ConfigError
from onechip.ladder.cli import parse_shape, parse_target, public

HEAVY = ("jax", "numpy", "matplotlib", "httptools", "uvloop", "msgspec", "rich.console", "zmq")
LOOK = """
import sys
from onechip import cli
status = cli.run(sys.argv[1:])
print(sorted(name for name in {heavy} if name in sys.modules), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize("words", [["bench", "--help"], ["bench", "sweep", "--help"], ["--help"]])
def test_help_imports_nothing_heavy(words: list[str]):
    code = LOOK.format(heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]" and "Usage" in done.stdout


def test_a_measurement_never_imports_jax():
    code = LOOK.format(heavy=("jax", "onechip.engine", "onechip.server", "matplotlib"))
    command = [
        sys.executable,
        "-c",
        code,
        "bench",
        "one",
        "http://127.0.0.1:9",
        "--out",
        "/nowhere/r",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error, seen = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "start the server" in error and seen == "[]"


def test_shapes_and_targets_are_read():
    assert parse_shape("512/128") == (512, 128)
    assert parse_target("ttft:200") == ("ttft", 200.0)


@pytest.mark.parametrize("text", ["512", "0/4", "a/b", "1/2/3", ""])
def test_what_is_no_shape_is_refused(text: str):
    with pytest.raises(ConfigError, match="512/128"):
        parse_shape(text)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:3", "e2e:-1"])
def test_what_is_no_target_is_refused(text: str):
    with pytest.raises(ConfigError, match="ttft:200"):
        parse_target(text)


def test_goodput_needs_an_open_load(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["bench", "sweep", "http://a", "--goodput", "ttft:200"]) == 2
    assert "--rate" in capsys.readouterr().err


def test_keys_stay_out_of_records():
    words = ["x", "bench", "--api-key", "secret", "--header=a: b", "--out", "r"]
    assert public(words) == ("onechip", "bench", "--api-key", "***", "--header=***", "--out", "r")
