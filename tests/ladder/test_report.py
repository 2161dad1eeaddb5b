"""A report says what the records say: every headline ratio is computed again, by other code, from raw repeats."""

import builtins
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ladder.stub import stub
from tests.ladder.test_compare import answers, cell, record
from tests.ladder.test_sweep import oned, swept

from onechip import cli
from onechip.ladder import journal, one, report, sweep
from onechip.ladder.record import Issue, Record

SETTINGS = sweep.SweepSettings(((24, 12),), (1, 2, 4), 3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two servers, each with `one`, a sweep and an eval in one record."""
    paths = []
    for number, gap in enumerate((0.002, 0.003)):
        directory = tmp_path_factory.mktemp("records")
        with stub(ttft=0.01, gap=gap) as url:
            cells = oned(url, directory / "one.json", one.OneSettings(max_tokens=8))
            whole = swept(url, directory / "sweep.json", SETTINGS)
        right = [n % (number + 2) > 0 for n in range(60)]
        run = msgspec.structs.replace(whole.run, arm=f"server-{number}")
        whole = msgspec.structs.replace(
            whole, run=run, cells=(*cells, *whole.cells), **answers(right)
        )
        journal.write_record(directory / "r.json", whole)
        paths.append(directory / "r.json")
    return paths


def raw_rate(cell: Any) -> float:
    """Median over passes of completion tokens / (last finish - first send), from a record's JSON."""
    rates = []
    for repeat in cell["repeats"]:
        ends = [r["sent_s"] + r["finish_s"] for r in repeat["requests"]]
        starts = [r["sent_s"] for r in repeat["requests"]]
        tokens = sum(r["output_tokens"] for r in repeat["requests"])
        rates.append(tokens / (max(ends) - min(starts)))
    return float(np.median(rates))


def raw_score(cell: Any) -> float:
    by_prompt: dict[str, list[float]] = {}
    for repeat in cell["repeats"]:
        for r in repeat["requests"]:
            by_prompt.setdefault(r["prompt"], []).append(r["output_tokens"] / r["finish_s"])
    medians = [np.median(speeds) for speeds in by_prompt.values()]
    return float(np.prod(medians) ** (1 / len(medians)))


def raw_name(cell: Any) -> str:
    work = cell["workload"]
    if work["kind"] == "one":
        return "six prompts" if work["concurrency"] == 1 else f"{work['concurrency']} at once"
    return f"{work['input_len']}/{work['output_len']} x{work['concurrency']}"


def test_every_headline_ratio_follows_from_the_records(measured: list[Path], tmp_path: Path):
    assert cli.run(["report", *map(str, measured), "--out", str(tmp_path), "--no-plots"]) == 0
    text = (tmp_path / "report.md").read_text()
    base, other = (json.loads(path.read_text()) for path in measured)
    ratios = dict(re.findall(r"^- server-1 against server-0: (.+?): ([\d.]+) times", text, re.M))
    assert len(ratios) == len(base["cells"]) == 5
    for ours, theirs in zip(other["cells"], base["cells"], strict=True):
        raw = raw_score if raw_name(ours) == "six prompts" else raw_rate
        assert float(ratios[raw_name(ours)]) == pytest.approx(raw(ours) / raw(theirs), rel=2e-3)
    (difference,) = re.findall(r"gsm8k \(n = 60\): ([+-][\d.]+)", text)
    scores = [np.mean([i.get("right", False) for i in r["items"]]) for r in (other, base)]
    assert float(difference) == pytest.approx(scores[0] - scores[1], abs=1e-4)


def test_the_page_asks_for_nothing_outside_and_holds_the_pictures(
    measured: list[Path], tmp_path: Path
):
    assert cli.run(["report", *map(str, measured), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", page)
    assert "<script" not in page and "default-src 'none'" in page
    names = {p.stem for p in tmp_path.glob("*.png")}
    assert names == {p.stem for p in tmp_path.glob("*.svg")}
    assert {"throughput-24-12", "ttft-24-12", "tpot-24-12", "compared-speed-1"} <= names
    assert page.count("data:image/svg+xml") == len(names)
    text = (tmp_path / "report.md").read_text()
    assert all(f"({name}.png)" in text for name in names)


def test_a_report_says_what_is_missing():
    whole = record(cells=(cell([9.0]), cell([9.0], 8)))
    bad = msgspec.structs.replace(cell([9.0]), status="failed", reason="3 of 4 requests failed")
    broken = record(cells=(bad,), issues=("the server was gone",))
    broken = msgspec.structs.replace(
        broken, run=msgspec.structs.replace(broken.run, status="interrupted", arm="b")
    )
    said = report.missing({"a": whole, "b": broken})
    assert said == [
        "b: the run did not end well (status interrupted)",
        "b: 8/10 x4 is failed: 3 of 4 requests failed",
        "b: 8/10 x8 was not measured",
    ]
    blocks = report.make([whole, broken], draw=False).blocks
    assert "the server was gone" in str(blocks) and "8/10 x8 was not measured" in str(blocks)


def test_one_record_alone_is_reported():
    made = report.make([record(cells=(cell([9.0]),))], draw=False)
    assert "9.0 tok/s" in str(made.blocks[1])


def test_names_are_all_different():
    twice: list[Record] = [record(), record()]
    assert len(set(report.names_of(twice))) == 2


def test_without_matplotlib_the_error_says_what_to_install(
    measured: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.run(["report", str(measured[0])]) == 2
    assert "onechip[report]" in capsys.readouterr().err


def test_text_of_a_server_cannot_become_markup(tmp_path: Path):
    evil = record(cells=(cell([9.0]),), issues=("<script>alert(1)</script>",))
    report.write(report.make([evil], draw=False), tmp_path)
    assert "<script" not in (tmp_path / "report.html").read_text()


def test_issues_reach_the_record_as_text(tmp_path: Path):
    with journal.open_run(tmp_path / "r.json", _header()) as run:
        run.add(Issue(text="odd"))
    assert journal.load(tmp_path / "r.json").issues == ("odd",)


def _header() -> Any:
    from tests.ladder.test_journal import header

    return header()
