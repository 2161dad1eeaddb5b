"""What may be compared, and that 'level' is said exactly when the range includes no difference."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.ladder.stub import stub
from tests.ladder.test_sweep import oned, swept

from onechip import cli
from onechip.ladder import compare, journal, one, sweep
from onechip.ladder.record import (
    Cell,
    Eval,
    Hardware,
    Item,
    Model,
    Record,
    RecordError,
    Repeat,
    Request,
    Run,
    Software,
    Workload,
)


def record(**parts: object) -> Record:
    return Record(
        schema="onechip.ladder",
        schema_version=1,
        run=Run(id="0" * 12, date="2026-01-01T00:00:00+00:00", status="done"),
        hardware=Hardware(),
        model=Model(id="m"),
        software=Software(engine="e"),
        **parts,  # pyright: ignore[reportArgumentType]
    )


def cell(speeds: list[float], concurrency: int = 4, **work: object) -> Cell:
    """A closed cell whose repeats have these speeds."""
    asked = {"kind": "closed", "input_len": 8, "output_len": 10, **work}
    requests = [Request(sent_s=0, ttft_s=0.1, finish_s=10 / s, output_tokens=10) for s in speeds]
    pairs = zip(requests, speeds, strict=True)
    return Cell(
        workload=Workload(concurrency=concurrency, **asked),  # pyright: ignore[reportArgumentType]
        status="ok",
        repeats=tuple(Repeat(wall_s=10 / s, output_tokens=10, requests=(r,)) for r, s in pairs),
        figures={"output_tok_per_s": float(np.median(speeds))},
    )


def answers(right: list[bool], task: str = "gsm8k", **settings: object) -> dict[str, object]:
    items = tuple(
        Item(task=task, id=str(n), right=ok, verdict="right" if ok else "wrong")
        for n, ok in enumerate(right)
    )
    return {"items": items, "evals": (Eval(task=task, status="ok", settings=settings),)}


def test_a_ratio_of_medians_with_its_range():
    ours, theirs = record(cells=(cell([200, 210, 205]),)), record(cells=(cell([100, 101, 99]),))
    (found,) = compare.compare(ours, theirs).cells
    assert found.ratio.value == pytest.approx(2.05)
    assert 200 / 101 <= found.ratio.low <= found.ratio.high <= 210 / 99
    assert not found.level and compare.verdict(found.ratio, 1.0) == "ahead"
    assert compare.verdict(compare.compare(theirs, ours).cells[0].ratio, 1.0) == "behind"


def test_repeats_that_overlap_are_level():
    ours, theirs = record(cells=(cell([100, 120, 90]),)), record(cells=(cell([101, 95, 118]),))
    (found,) = compare.compare(ours, theirs).cells
    assert found.level and compare.verdict(found.ratio, 1.0) == "level"


def test_questions_are_paired_and_flips_are_named():
    ours = record(**answers([True] * 80 + [False] * 20))
    theirs = record(**answers([True] * 60 + [False] * 38 + [True] * 2))
    (found,) = compare.compare(ours, theirs).evals
    assert found.difference.value == pytest.approx(0.18)
    assert (len(found.won), found.lost) == (20, ("98", "99"))
    assert not found.level and found.n == 100


def test_equal_answers_are_level():
    same = record(**answers([True, False] * 30))
    (found,) = compare.compare(same, same).evals
    assert found.level and found.difference.low == found.difference.high == 0


def test_only_questions_in_both_count_and_the_rest_is_named():
    found = compare.compare(record(**answers([True] * 10)), record(**answers([True] * 7)))
    assert found.evals[0].n == 7
    assert found.skipped == ("gsm8k: 10 and 7 answers, 7 in both",)


def test_other_settings_are_not_the_same_eval():
    ours, theirs = record(**answers([True], max_tokens=9)), record(**answers([True], max_tokens=8))
    with pytest.raises(
        RecordError, match="max_tokens is 9 in the first record and 8 in the second"
    ):
        compare.compare(ours, theirs)


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ({"output_len": 20}, "output_len is 10 in the first record and 20"),
        ({"endpoint": "chat"}, "endpoint is completions in the first record and chat"),
    ],
)
def test_other_work_is_refused_with_the_field(work: dict[str, object], says: str):
    with pytest.raises(RecordError, match=says):
        compare.compare(record(cells=(cell([1]),)), record(cells=(cell([1], **work),)))


def test_a_failed_cell_is_named_and_not_compared():
    bad = msgspec.structs.replace(cell([1], 8), status="failed")
    ours, theirs = record(cells=(cell([1]), bad)), record(cells=(cell([1]), cell([1], 8)))
    found = compare.compare(ours, theirs)
    assert len(found.cells) == 1
    assert found.skipped == ("8/10 x8: failed in the first record",)


def test_two_servers_measured_by_one_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The stub's true ratio is known: 2.0 in decode, less where the first token counts."""
    settings = sweep.SweepSettings(((24, 20),), (1, 2), 3)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    with stub(ttft=0.02, gap=0.005) as url:
        swept(url, a, settings)
    with stub(ttft=0.04, gap=0.01) as url:
        swept(url, b, settings)
    found = compare.compare(journal.load(a), journal.load(b))
    assert [c.ratio.value for c in found.cells] == pytest.approx([2.0, 2.0], rel=0.15)
    assert cli.run(["compare", str(a), str(b)]) == 0
    assert "ahead" in capsys.readouterr().out


def test_texts_of_one_are_compared(tmp_path: Path):
    cells = []
    for word in (" yes", " no"):
        with stub(text=word) as url:
            cells.append(oned(url, tmp_path / f"{word}.json", one.OneSettings(max_tokens=4)))
    same = compare.compare(record(cells=cells[0]), record(cells=cells[0]))
    other = compare.compare(record(cells=cells[0]), record(cells=cells[1]))
    assert same.texts == {"prompts": 6, "equal": 6, "common_prefix_chars": 16}
    assert other.texts is not None and other.texts["equal"] == 0


def test_a_record_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "there is no record" in capsys.readouterr().err
