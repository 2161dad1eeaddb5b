"""The grid against a stub: prompts of exact length, nothing hidden when it fails, and nothing lost when it dies."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from tests.ladder.stub import process, stub

from onechip.errors import ConfigError
from onechip.ladder import bench, figures, journal, load, one, prompts, sweep, tables
from onechip.ladder.client import Client, Target
from onechip.ladder.http import run
from onechip.ladder.progress import Silent
from onechip.ladder.record import Cell, Record

SMALL = sweep.SweepSettings(shapes=((24, 8),), concurrencies=(1, 3), repeats=2)


def swept(
    url: str, path: Path, settings: sweep.SweepSettings = SMALL, resume: bool = False
) -> Record:
    async def work() -> None:
        place = bench.Place(path, resume)
        async with bench.opened(Target(url, timeout=20), place, Silent()) as under_way:
            await sweep.measure(under_way, settings)

    run(work())
    return journal.load(path)


@pytest.mark.parametrize(
    ("tokenize", "endpoint", "exactness"),
    [
        ("prompt", "completions", "exact"),
        ("content", "completions", "exact"),
        ("none", "completions", "calibrated"),
        ("prompt", "chat", "calibrated"),
    ],
)
def test_prompts_have_the_length_asked_for(
    tmp_path: Path, tokenize: str, endpoint: str, exactness: str
):
    settings = sweep.SweepSettings(((24, 8),), (2,), 2, endpoint=endpoint)  # pyright: ignore
    with stub(tokenize=tokenize, prompt_overhead=7) as url:
        (cell,) = swept(url, tmp_path / "r.json", settings).cells
    assert (cell.status, cell.prompts) == ("ok", exactness)
    assert not any("prompts had" in note for note in cell.notes)
    assert cell.figures["prompt_tokens_min"] == cell.figures["prompt_tokens_max"] == 24


@pytest.mark.parametrize("length", [20, 24, 131])
def test_a_length_is_exact_where_a_word_is_several_tokens(tmp_path: Path, length: int):
    settings = sweep.SweepSettings(((length, 4),), (3,), 1)
    with stub(bytewise=True) as url:
        (cell,) = swept(url, tmp_path / "r.json", settings).cells
    assert cell.figures["prompt_tokens_min"] == cell.figures["prompt_tokens_max"] == length


def test_no_two_prompts_are_alike_nor_begin_alike():
    async def make(client: Client) -> list[str]:
        return await prompts.Sizer(client, "completions", "prompt").make(40, 60)

    async def work(url: str) -> list[str]:
        async with Client(Target(url, model="stub")) as client:
            return await make(client)

    with stub() as url:
        made = run(work(url))
    assert len({" ".join(text.split()[:4]) for text in made}) == 60


def test_a_prompt_shorter_than_its_wrapping_is_refused(tmp_path: Path):
    with stub(prompt_overhead=30) as url, pytest.raises(ConfigError, match="--shape"):
        swept(url, tmp_path / "r.json", sweep.SweepSettings(((20, 4),), (1,), endpoint="chat"))


def test_every_figure_in_a_record_can_be_computed_again_from_its_repeats(tmp_path: Path):
    with stub(ttft=0.01, gap=0.001) as url:
        record = swept(url, tmp_path / "r.json")
    assert len(record.cells) == 2
    for cell in record.cells:
        assert cell.figures == figures.load_figures(cell.repeats, cell.targets_ms)
        assert cell.percentiles == figures.percentiles(cell.repeats)
        assert cell.client is not None and cell.client.cpu_share > 0


def test_what_does_not_fit_is_infeasible_and_the_grid_goes_on(tmp_path: Path):
    settings = sweep.SweepSettings(((90, 20), (24, 8)), (1,), 2)
    with stub(context=100) as url:
        record = swept(url, tmp_path / "r.json", settings)
    assert [c.status for c in record.cells] == ["infeasible", "ok"]
    assert "exceeds the context of 100" in (record.cells[0].reason or "")
    assert "exceeds the context" in tables.printed(record)


def test_refused_requests_make_a_failed_cell_that_says_so(tmp_path: Path):
    with stub(fail_after=9) as url:
        record = swept(url, tmp_path / "r.json")
    assert [c.status for c in record.cells] == ["ok", "failed"]
    assert record.cells[1].errors[0].status == 503
    assert "told to fail" in (record.cells[1].reason or "")


def test_a_field_that_a_server_refuses_is_left_out_and_told(tmp_path: Path):
    with stub(refuse={"ignore_eos": "unknown field ignore_eos"}) as url:
        record = swept(url, tmp_path / "r.json")
    assert all(c.status == "ok" for c in record.cells)
    assert all("ignore_eos was refused" in c.notes[0] for c in record.cells)


def test_a_server_that_dies_ends_the_run_and_resuming_finishes_it(tmp_path: Path):
    path = tmp_path / "r.json"
    settings = sweep.SweepSettings(((24, 8),), (1, 2, 4, 8), 2)
    with stub(die_after=8) as url, pytest.raises(bench.ServerGone, match="--resume"):
        swept(url, path, settings)
    broken = journal.load(path)
    assert broken.run.status == "failed"
    assert [c.status for c in broken.cells] == ["ok", "failed", "missing", "missing"]
    assert "the server was gone" in broken.issues[0]
    before = broken.cells[0]
    with stub() as url:
        whole = swept(url, path, settings, resume=True)
    assert [c.status for c in whole.cells] == ["ok"] * 4
    assert whole.cells[0] == before and whole.run.status == "done"


def test_a_dead_server_is_noticed_at_once(tmp_path: Path):
    settings = sweep.SweepSettings(((24, 2000),), (4,), 2)
    with process(gap=0.01) as (url, running):
        stop = subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -9 {running.pid}"])
        began = time.monotonic()
        with pytest.raises(bench.ServerGone):
            swept(url, tmp_path / "r.json", settings)
        stop.wait()
    assert time.monotonic() - began < 6


CLI = [sys.executable, "-m", "onechip.cli", "bench", "sweep"]


def start(url: str, path: Path, *more: str) -> subprocess.Popen[str]:
    flags = [
        "--shape",
        "24/8",
        "-c",
        "1",
        "-c",
        "2",
        "-c",
        "3",
        "--repeats",
        "2",
        "--out",
        str(path),
    ]
    return subprocess.Popen(
        [*CLI, url, *flags, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_cells(path: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    partial = path.with_name(path.name + ".partial")
    while not partial.exists() or partial.read_text().count("\n") < 1 + count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [(signal.SIGKILL, -signal.SIGKILL, "running"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_client_that_is_ended_keeps_its_cells_and_resumes(
    tmp_path: Path, number: signal.Signals, code: int, status: str
):
    path = tmp_path / "r.json"
    with stub(ttft=0.2, gap=0.02) as url:
        client = start(url, path)
        wait_for_cells(path, 1)
        os.kill(client.pid, number)
        _, said = client.communicate(timeout=30)
        assert client.returncode == code
        left = journal.load(path)
        assert left.run.status == status and left.cells[0].status == "ok"
        if number == signal.SIGINT:
            assert "what was measured is in" in said
        client = start(url, path, "--resume")
        out, _ = client.communicate(timeout=60)
    assert client.returncode == 0
    whole = journal.load(path)
    assert [c.status for c in whole.cells] == ["ok"] * 3 and whole.cells[0] == left.cells[0]
    assert "24/8 x3" in out and "of a core" in out


def test_an_open_load_comes_by_the_clock_and_counts_goodput(tmp_path: Path):
    settings = sweep.SweepSettings(
        ((24, 4),), rates=(50.0,), requests=30, repeats=1, targets_ms={"ttft": 5000, "e2e": 5000}
    )
    with stub(ttft=0.05) as url:
        (cell,) = swept(url, tmp_path / "r.json", settings).cells
    sends = [r.sent_s for r in cell.repeats[0].requests]
    assert sends == sorted(sends) and abs(sends[-1] - 29 / 50) < 0.1
    assert cell.figures["goodput_req_per_s"] == pytest.approx(cell.figures["requests_per_s"])


def test_arrivals_have_the_rate_and_the_burstiness():
    for burstiness in (0.25, 1.0, 4.0):
        times = load.arrivals(4001, 10.0, burstiness, seed=1)
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        variance = sum((g - mean) ** 2 for g in gaps) / len(gaps)
        assert times[-1] == pytest.approx(400) and mean == pytest.approx(0.1)
        assert mean**2 / variance == pytest.approx(burstiness, rel=0.15)
    assert load.arrivals(9, 10.0, 1.0, 1) == load.arrivals(9, 10.0, 1.0, 1)


def oned(url: str, path: Path, settings: one.OneSettings) -> tuple[Cell, ...]:
    async def work() -> tuple[Cell, ...]:
        async with bench.opened(Target(url), bench.Place(path), Silent()) as under_way:
            return await one.measure(under_way, settings)

    return run(work())


def test_one_asks_six_prompts_three_times_and_four_at_once(tmp_path: Path):
    with stub(ttft=0.01, gap=0.001) as url:
        single, four = oned(url, tmp_path / "r.json", one.OneSettings(max_tokens=8))
    assert [len(r.requests) for r in single.repeats] == [6, 6, 6]
    assert [len(r.requests) for r in four.repeats] == [4, 4, 4]
    assert single.figures == figures.one_figures(single.repeats)
    assert single.figures["repeats_identical"] == single.figures["prompts"] == 6
    assert set(single.texts) == set(prompts.ONE)
    assert one.text_equality(single, single)["equal"] == 6


def test_one_says_when_thinking_cannot_be_turned_off(tmp_path: Path):
    with stub(refuse={"chat_template_kwargs": "no such field"}) as url:
        single, _ = oned(url, tmp_path / "r.json", one.OneSettings(max_tokens=4))
    assert single.status == "ok"
    assert single.notes == ("chat_template_kwargs was refused and left out (400: no such field)",)


def test_one_sends_texts_to_be_continued_where_there_is_no_chat(tmp_path: Path):
    with stub(refuse={"messages": "no chat template"}) as url:
        single, _ = oned(url, tmp_path / "r.json", one.OneSettings(max_tokens=4))
    assert single.workload.endpoint == "completions"
    assert "takes no chat" in single.notes[0]


def test_common_prefix_counts_equal_characters():
    assert one.common_prefix("abcd", "abxd") == 2
    assert one.common_prefix("ab", "abc") == 2
