"""Nothing that was measured is lost: not by a full disk, not by a kill at any byte, not by Ctrl-C."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onechip.ladder import journal, record
from onechip.ladder.journal import load, new_header, open_run
from onechip.ladder.record import Cell, Hardware, Item, Model, RecordError, Software, Workload


def header(model: str = "m") -> record.Header:
    return new_header(Model(id=model), Software(engine="e", version="1"), Hardware())


def cell(concurrency: int = 1, status: record.CellStatus = "ok", **fields: float) -> Cell:
    work = Workload(kind="closed", input_len=8, output_len=8, concurrency=concurrency)
    return Cell(workload=work, status=status, figures=fields)


def item(number: int) -> Item:
    return Item(task="gsm8k", id=str(number), right=True, verdict="right", text="x" * 50)


def test_a_record_reads_back_as_it_was_written(tmp_path: Path):
    path = tmp_path / "r.json"
    with open_run(path, header()) as run:
        run.add(cell(1, tok_per_s=3.5))
        run.add(item(1))
        run.add(record.Probe(domain="tools", name="one call", verdict="pass"))
        run.add(record.Startup(first_answer_s=3.0))
        run.add(record.Issue(text="no usage"))
        kept = run.record
    got = load(path)
    assert (got.cells, got.items, got.probes) == (kept.cells, kept.items, kept.probes)
    assert got.startup == record.Startup(first_answer_s=3.0) and got.issues == ("no usage",)
    assert got.run.status == "done" and got.run.ended
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert record.assemble(*record.taken_apart(got)) == got


def test_the_newest_of_a_kind_stands(tmp_path: Path):
    with open_run(tmp_path / "r.json", header()) as run:
        run.add(cell(1, "failed"))
        run.add(cell(1, tok_per_s=2.0))
    assert [c.status for c in load(tmp_path / "r.json").cells] == ["ok"]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_however_a_run_ends_what_it_measured_is_closed(
    tmp_path: Path, error: type[BaseException], status: str
):
    def broken_off() -> None:
        with open_run(tmp_path / "r.json", header()) as run:
            run.add(cell())
            raise error

    with pytest.raises(error):
        broken_off()
    got = load(tmp_path / "r.json")
    assert got.run.status == status and len(got.cells) == 1


def test_a_run_is_not_overwritten_unasked(tmp_path: Path):
    with open_run(tmp_path / "r.json", header()):
        pass
    with pytest.raises(RecordError, match="--resume"), open_run(tmp_path / "r.json", header()):
        pass


def test_resuming_keeps_the_id_and_what_is_there(tmp_path: Path):
    with open_run(tmp_path / "r.json", header()) as run:
        run.add(cell(1))
        run.add(cell(2, "failed"))
        first = run.header.run.id
    with open_run(tmp_path / "r.json", header(), resume=True) as run:
        assert run.has(cell(1).workload) and not run.has(cell(2).workload)
        run.add(cell(2))
    got = load(tmp_path / "r.json")
    assert got.run.id == first and [c.status for c in got.cells] == ["ok", "ok"]


def test_another_model_cannot_be_resumed_into_a_record(tmp_path: Path):
    with open_run(tmp_path / "r.json", header()):
        pass
    wrong = open_run(tmp_path / "r.json", header("other"), resume=True)
    with pytest.raises(RecordError, match=r"model\.id is 'm' and the server's is 'other'"), wrong:
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.ladder.test_journal import cell, header, item
from onechip.ladder.journal import open_run
with open_run(Path(sys.argv[1]), header()) as run:
    run.add(cell(1)); run.add(item(1))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_all_that_it_added(tmp_path: Path):
    path = tmp_path / "r.json"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], cwd=root, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    got = load(path)
    assert (len(got.cells), len(got.items), got.run.status) == (1, 1, "running")
    with open_run(path, header(), resume=True) as run:
        assert run.has(cell(1).workload) and set(run.items("gsm8k")) == {"1"}
    assert load(path).run.status == "done"


@given(st.data())
def test_a_journal_cut_at_any_byte_keeps_every_whole_line(data: st.DataObject):
    lines = [msgspec.json.encode(part) + b"\n" for part in (header(), cell(1), item(1), cell(2))]
    whole = b"".join(lines)
    cut = data.draw(st.integers(len(lines[0]), len(whole)))
    _, entries = journal._parse_journal(whole[:cut], "x")
    expected = sum(len(b"".join(lines[: n + 1])) <= cut for n in range(1, 4))
    assert len(entries) == expected


def test_damage_before_the_end_is_an_error_that_names_the_line(tmp_path: Path):
    lines = [msgspec.json.encode(header()), b'{"type":"cell"', msgspec.json.encode(cell(1)), b""]
    (tmp_path / "r.json.partial").write_bytes(b"\n".join(lines))
    with pytest.raises(RecordError, match="line 2"):
        load(tmp_path / "r.json")


class FullDisk:
    """A file on a disk with `room` bytes left: it takes a part of a line, then refuses, as a kernel does."""

    def __init__(self, file: object, room: int):
        self.file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(data[: self.room])  # pyright: ignore[reportAttributeAccessIssue]
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 30])
def test_a_full_disk_ends_the_run_and_keeps_every_earlier_entry(tmp_path: Path, room: int):
    path = tmp_path / "r.json"

    def fill(monkey: pytest.MonkeyPatch) -> None:
        with open_run(path, header()) as run:
            run.add(cell(1))
            run._file = FullDisk(run._file, room)  # pyright: ignore[reportAttributeAccessIssue]
            full = RecordError("full")
            monkey.setattr(journal, "write_record", lambda *_: (_ for _ in ()).throw(full))
            run.add(cell(2))

    with pytest.MonkeyPatch.context() as monkey, pytest.raises(RecordError, match="No space left"):
        fill(monkey)
    assert [c.workload.concurrency for c in load(path).cells] == [1]
    with open_run(path, header(), resume=True) as run:
        run.add(cell(2))
    assert len(load(path).cells) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_really_fills_up_loses_the_current_entry_only(small_disk: Path):
    path, written = small_disk / "r.json", 0

    def fill() -> None:
        nonlocal written
        with open_run(path, header()) as run:
            for number in range(10_000):
                run.add(item(number))
                written += 1

    with pytest.raises(RecordError, match=r"No space left on device.*--resume"):
        fill()
    assert 100 < written < 1000
    assert len(load(path).items) == written
    moved = small_disk.parent / "r.json"
    shutil.copy(small_disk / "r.json.partial", small_disk.parent / "r.json.partial")
    with open_run(moved, header(), resume=True) as run:
        run.add(item(written))
    assert len(load(moved).items) == written + 1 and load(moved).run.status == "done"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_record_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "r.json"
    with open_run(path, header()) as run:
        run.add(cell(1))
    before = path.read_bytes()
    (tmp_path / "r.json.new").symlink_to("/dev/full")
    with pytest.raises(RecordError, match="make room"):
        journal.write_record(path, load(path))
    assert path.read_bytes() == before and not (tmp_path / "r.json.new").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{}", "schema is None"),
        (b'{"schema": "onechip.ladder", "schema_version": 99}', "install a newer onechip"),
        (b'{"schema": "onechip.ladder", "schema_version": 1, "run": 3}', r"\$\.run"),
        (b"not json", "no record"),
    ],
)
def test_what_is_no_record_is_refused_with_the_field(tmp_path: Path, content: bytes, says: str):
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(RecordError, match=says):
        load(tmp_path / "r.json")


def test_a_missing_record_is_an_error_and_an_unknown_field_is_not(tmp_path: Path):
    with pytest.raises(RecordError, match="there is no record"):
        load(tmp_path / "r.json")
    with open_run(tmp_path / "r.json", header()):
        pass
    grown = msgspec.json.decode((tmp_path / "r.json").read_bytes()) | {"new": 1}
    (tmp_path / "r.json").write_bytes(msgspec.json.encode(grown))
    assert load(tmp_path / "r.json").model.id == "m"
