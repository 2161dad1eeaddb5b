"""The command line: fast help, inspection of every real configuration, and one line for whatever cannot be served."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests import tiny_tokenizer

from onechip import cli, flags
from onechip.config import EngineConfig, ServerConfig
from onechip.errors import DoesNotFit, InvalidRequest

DATA = Path(__file__).parent / "data"
CONFIGS = DATA / "configs"
MINI = DATA / "golden" / "gemma3-mini"


def onechip(*arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onechip.cli", *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


# Help and flags


def test_help_answers_without_jax_and_fast():
    """Processor time: how long it takes on a machine that has nothing else to do."""
    times: list[float] = []
    for _ in range(3):
        begun = children_seconds()
        done = onechip("--help")
        times.append(children_seconds() - begun)
        assert done.returncode == 0
        assert "serve" in done.stdout
    assert min(times) < 0.5


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_importing_the_command_line_imports_neither_jax_nor_numpy():
    script = (
        "import sys, onechip.cli; print([m for m in ('jax', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_arguments_show_help(capsys: pytest.CaptureFixture[str]):
    assert cli.run([]) == 0
    assert "Usage: onechip" in capsys.readouterr().out


def test_every_config_field_is_a_flag_with_help():
    assert {f.name for config in (EngineConfig, ServerConfig) for f in fields(config)} == set(
        flags.FLAGS
    )


def test_flags_reach_the_server_as_config_objects(monkeypatch: pytest.MonkeyPatch):
    seen = catch_serve(monkeypatch)
    flags = "--max-seqs 3 --dtype float32 --port 0 --random-weights --kv-tokens 640"
    names = "--served-model-name a --served-model-name b"
    status = cli.run(["serve", "some/model", *flags.split(), *names.split()])
    assert status == 7
    assert seen == [
        "some/model",
        EngineConfig(max_seqs=3, dtype="float32", random_weights=True, kv_tokens=640),
        ServerConfig(port=0, served_model_names=("a", "b")),
    ]


def test_no_flags_are_the_defaults_of_the_config_objects(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ONECHIP_API_KEY", raising=False)
    seen = catch_serve(monkeypatch)
    cli.run(["serve", "some/model"])
    assert seen[1:] == [EngineConfig(), ServerConfig()]


def test_generate_compiles_on_first_use_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    class Stand:
        def __init__(self, model: str, report: Any, **flags: Any):
            seen.append(EngineConfig(**flags))
            raise DoesNotFit("seen")

    monkeypatch.setattr("onechip.llm.LLM", Stand)
    cli.run(["generate", "m", "text"])
    cli.run(["generate", "m", "text", "--precompile"])
    assert seen == [EngineConfig(precompile=False), EngineConfig()]


def test_api_keys_come_from_flags_or_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONECHIP_API_KEY", "one two")
    seen = catch_serve(monkeypatch)
    cli.run(["serve", "m"])
    assert seen[2].api_keys == ("one", "two")
    seen = catch_serve(monkeypatch)
    cli.run(["serve", "m", "--api-key", "three"])
    assert seen[2].api_keys == ("three",)


def catch_serve(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the server; the list receives what it was called with, and the command's status is 7."""
    seen: list[Any] = []

    def serve(*arguments: Any) -> int:
        seen.extend(arguments)
        return 7

    monkeypatch.setattr("onechip.server.main.serve", serve)
    return seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve"], "MODEL"),
        (["serve", "m", "--port", "70000"], "--port"),
        (["serve", "m", "--dtype", "int3"], "--dtype"),
        (["serve", "m", "--max-seqs", "0"], "--max-seqs"),
        (["serve", "m", "--no-such-flag"], "--no-such-flag"),
        (["fly"], "fly"),
        (["inspect", "m", "--chip", "abacus"], "abacus"),
    ],
)
def test_a_bad_command_line_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.run(arguments) == 2
    assert_one_line(capsys.readouterr().err, said)


@pytest.mark.parametrize(
    ("error", "status"),
    [(DoesNotFit("too\nbig"), 2), (InvalidRequest("bad"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_become_exit_statuses(
    error: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def serve(*_: Any) -> int:
        raise error

    monkeypatch.setattr("onechip.server.main.serve", serve)
    assert cli.run(["serve", "m"]) == status
    assert capsys.readouterr().err.count("\n") == (status != 130)


# Inspect


def test_inspect_prints_the_published_figures_of_e2b(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["inspect", str(CONFIGS / "gemma-4-E2B")]) == 0
    printed = capsys.readouterr().out
    for figure in ("9.257 GB", "4.560 GB", "6,144 B", "6.00 MiB", "4.629 B"):
        assert figure in printed


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.iterdir() if path.is_dir()))
def test_inspect_prints_one_row_a_layer_of_every_real_configuration(
    name: str, capsys: pytest.CaptureFixture[str]
):
    directory = CONFIGS / name
    config = json.loads((directory / "config.json").read_text())
    assert cli.run(["inspect", str(directory)]) == 0
    printed = capsys.readouterr().out
    rows = [
        line
        for line in printed.splitlines()
        if line.strip().split()[:1] and line.strip().split()[0].isdigit()
    ]
    assert len(rows) == config["text_config"]["num_hidden_layers"]
    assert cli.run(["inspect", str(directory), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == len(rows)


@pytest.mark.parametrize("name", sorted(path.name for path in (DATA / "golden").iterdir()))
def test_inspect_checks_a_whole_checkpoint(name: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["inspect", str(DATA / "golden" / name), "--dtype", "float32"]) == 0
    assert "No weights" not in capsys.readouterr().out


def test_inspect_names_one_chip(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["inspect", str(CONFIGS / "gemma-4-E2B"), "--chip", "cuda-h200", "--json"]) == 0
    (chip,) = json.loads(capsys.readouterr().out)["chips"]
    assert chip["name"] == "cuda-h200"


def test_inspect_refuses_a_model_too_big_for_the_chip_it_names(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["inspect", str(CONFIGS / "gemma-4-31B"), "--chip", "tpu-v5e-1"]) == 2
    assert_one_line(capsys.readouterr().err, "61.395 GB", "tpu-v5e-1")


# What cannot be served


def assert_one_line(stderr: str, *said: str) -> None:
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("onechip: error: ")
    for words in said:
        assert words in stderr


def add_tokenizer(directory: Path) -> Path:
    # Its control pieces are renamed: under their own names they must have the ids of the whole vocabulary.
    text = json.dumps(tiny_tokenizer.document("gemma3")).replace("_of_", "_off_")
    (directory / "tokenizer.json").write_text(text)
    return directory


def copy_of_mini(target: Path) -> Path:
    shutil.copytree(MINI, target)
    return add_tokenizer(target)


def missing_file(tmp_path: Path) -> tuple[Path, str]:
    return tmp_path / "absent.gguf", "absent.gguf"


def truncated(tmp_path: Path) -> tuple[Path, str]:
    weights = copy_of_mini(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return weights.parent, "model.safetensors"


def unknown_layer_type(tmp_path: Path) -> tuple[Path, str]:
    path = copy_of_mini(tmp_path / "m") / "config.json"
    config = json.loads(path.read_text())
    config["layer_types"][1] = "spiral_attention"
    path.write_text(json.dumps(config))
    return path.parent, "spiral_attention"


def missing_tensor(tmp_path: Path) -> tuple[Path, str]:
    directory = copy_of_mini(tmp_path / "m")
    tensors = load_file(directory / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    del tensors[name]
    save_file(tensors, directory / "model.safetensors")
    return directory, "layers.1.mlp.up_proj.weight"


def extra_tensor(tmp_path: Path) -> tuple[Path, str]:
    directory = copy_of_mini(tmp_path / "m")
    tensors = load_file(directory / "model.safetensors")
    prefix = next(name for name in tensors if "layers.0." in name).partition("layers.0.")[0]
    tensors[prefix + "layers.0.mlp.side_proj.weight"] = np.zeros((4, 4), np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory, "layers.0.mlp.side_proj.weight"


Case = Callable[[Path], tuple[Path, str]]
CASES: list[Case] = [missing_file, truncated, unknown_layer_type, missing_tensor, extra_tensor]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_inspect_says_what_is_wrong_in_one_line(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, said = case(tmp_path)
    assert cli.run(["inspect", str(model)]) == 2
    assert_one_line(capsys.readouterr().err, said)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_generate_says_what_is_wrong_in_one_line(case: Case, tmp_path: Path):
    model, said = case(tmp_path)
    done = onechip("generate", model, "hello")
    assert done.returncode == 2
    assert_one_line(done.stderr, said)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_serve_says_what_is_wrong_in_one_line(case: Case, tmp_path: Path):
    model, said = case(tmp_path)
    done = onechip("serve", model, "--port", "0")
    assert done.returncode == 2
    assert_one_line(done.stderr, said)


@pytest.mark.parametrize("command", [["generate", "{}", "hello"], ["serve", "{}", "--port", "0"]])
def test_a_model_too_big_for_memory_is_refused_before_anything_is_made(
    command: list[str], tmp_path: Path
):
    config = json.loads((CONFIGS / "gemma-4-31B" / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 1000
    (add_tokenizer(tmp_path) / "config.json").write_text(json.dumps(config))
    begun = time.perf_counter()
    done = onechip(*(part.format(tmp_path) for part in command), "--random-weights")
    assert done.returncode == 2
    assert_one_line(done.stderr, "GB")
    assert "-" not in done.stderr.partition("GB")[0]  # no negative number
    assert time.perf_counter() - begun < 60
