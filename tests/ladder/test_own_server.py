"""The ladder against this project's own HTTP server (with a fake engine): every request it sends is understood."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes import FakeEngine
from tests.ladder.test_eval_cli import bfcl_folder, gsm8k_file
from tests.server.harness import running

from onechip import cli
from onechip.ladder import journal


@pytest.mark.parametrize(("task", "data"), [("gsm8k", gsm8k_file), ("bfcl", bfcl_folder)])
def test_an_eval_gets_an_answer_to_every_question(
    tmp_path: Path, task: str, data: Callable[[Path, int], Path]
):
    out = tmp_path / "r.json"
    flags = ["--data", str(data(tmp_path, 5)), "--gate", "0", "--max-tokens", "8"]
    with running(family="dialect") as server:
        assert cli.run(["eval", task, server.url, *flags, "--out", str(out)]) == 0
    found = journal.load(out)
    assert found.evals[0].figures["errors"] == 0
    assert found.evals[0].settings["thinking"] == "off"
    assert found.issues == ()


def test_no_probe_ends_in_an_error(tmp_path: Path):
    out = tmp_path / "probes.json"
    with running(FakeEngine(max_model_len=2048), family="dialect") as server:
        assert cli.run(["eval", "probes", server.url, "--out", str(out)]) == 0
    found = {f"{p.domain}: {p.name}": (p.verdict, p.detail) for p in journal.load(out).probes}
    assert {name: seen for name, seen in found.items() if seen[0] == "error"} == {}
