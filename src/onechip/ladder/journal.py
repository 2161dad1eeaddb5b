"""How a record gets to disk while it is made, so that a crash loses the current cell and nothing else.

1. `open_run` writes NAME.json.partial: a header, then one line for every entry (a cell, an answer, a probe), each
   forced to the disk before the next measurement starts. The thousandth answer costs no more than the first.
2. A line that did not get through (a full disk) is cut off again, so what stands before it stays whole, and the run
   ends with an error that says where it is.
3. At the end, however it comes (done, Ctrl-C, an error), NAME.json is written beside, forced to the disk and moved into
   place in one step; then the partial file goes. After `kill -9` or a power cut the partial file is what is left.
4. `load` reads either. A torn last line is what a crash leaves and is dropped; a torn line elsewhere is damage.
5. With `resume`, a run goes on from either: what is there is kept, and `Journal.has` says so.
"""

import contextlib
import os
import platform
import secrets
import sys
from asyncio import CancelledError
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

import msgspec

from onechip import __version__
from onechip.ladder import record as records
from onechip.ladder.record import (
    Cell,
    Entry,
    Hardware,
    Header,
    Item,
    Model,
    Record,
    RecordError,
    Run,
    RunStatus,
    Software,
    Workload,
)

_ENTRY = msgspec.json.Decoder(Entry)
_HEADER = msgspec.json.Decoder(Header)


def now() -> str:
    """The time of day as records hold it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_header(
    model: Model,
    software: Software,
    hardware: Hardware,
    *,
    command: Sequence[str] = (),
    arm: str | None = None,
) -> Header:
    """A header for a run that starts now, with a fresh id; the client describes itself."""
    run = Run(
        id=secrets.token_hex(6), date=now(), status="running", command=tuple(command), arm=arm
    )
    software = msgspec.structs.replace(
        software, client=f"onechip {__version__}", client_python=platform.python_version()
    )
    return Header(
        schema=records.SCHEMA,
        schema_version=records.SCHEMA_VERSION,
        run=run,
        hardware=hardware,
        model=model,
        software=software,
    )


class Journal:
    """A run that is being recorded. `entries` is all that is on disk already."""

    def __init__(self, path: Path, header: Header, entries: list[Entry]):
        self.path = path
        self.header = header
        self.entries = entries
        self._file = _create(records.journal_path(path), header, entries)

    def add(self, entry: Entry) -> None:
        """Put one entry on the disk. Raises RecordError when it cannot be written; the earlier ones stay."""
        start = self._file.tell()
        try:
            _write(self._file, msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
                self._file.seek(start)
            partial = records.journal_path(self.path)
            raise RecordError(
                f"cannot write {partial}: {error.strerror}; what was measured before is in it: "
                "make room and run again with --resume"
            ) from error
        self.entries.append(entry)

    def has(self, workload: Workload) -> bool:
        """Whether a cell of this workload was measured well (a failed or missing one is worth another try)."""
        done = (e for e in self.entries if isinstance(e, Cell) and e.workload == workload)
        return any(cell.status in ("ok", "infeasible") for cell in done)

    def items(self, task: str) -> dict[str, Item]:
        """The answers of an eval that are on disk, by question."""
        return {e.id: e for e in self.entries if isinstance(e, Item) and e.task == task}

    @property
    def record(self) -> Record:
        return records.assemble(self.header, self.entries)

    def close(self, status: RunStatus) -> Record:
        """Write the record file and remove the partial one. Raises RecordError; then the partial one stays."""
        run = msgspec.structs.replace(self.header.run, status=status, ended=now())
        self.header = msgspec.structs.replace(self.header, run=run)
        record = self.record
        self._file.close()
        write_record(self.path, record)
        records.journal_path(self.path).unlink(missing_ok=True)
        return record


@contextlib.contextmanager
def open_run(path: Path, header: Header, *, resume: bool = False) -> Generator[Journal]:
    """Record a run at `path`. Without `resume` the file must not exist yet. Raises RecordError.

    The block's end closes the record: done, interrupted by Ctrl-C, or failed by anything else.
    """
    journal = _resumed(path, header) if resume else _fresh(path, header)
    try:
        yield journal
    except (KeyboardInterrupt, CancelledError):  # asyncio turns Ctrl-C into the second
        journal.close("interrupted")
        raise
    except BaseException:
        with contextlib.suppress(RecordError):  # the first error says more; the partial file stays
            journal.close("failed")
        raise
    journal.close("done")


def load(path: Path | str) -> Record:
    """The record at `path`, or what a run that broke off left beside it. Raises RecordError."""
    path = Path(path)
    if path.suffix != ".partial" and path.exists():
        return records.parse(_read(path), str(path))
    partial = path if path.suffix == ".partial" else records.journal_path(path)
    if not partial.exists():
        raise RecordError(f"there is no record {path}; a run writes one with --out")
    return records.assemble(*_parse_journal(_read(partial), str(partial)))


def write_record(path: Path, record: Record) -> None:
    """Write a record file in one step: a reader sees the old one or the new one, whole. Raises RecordError."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb", buffering=0) as file:
            _write(file, records.dump(record))
        beside.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise RecordError(
            f"cannot write {path}: {error.strerror}; what was measured is in "
            f"{records.journal_path(path)}: make room and run again with --resume"
        ) from error


def _fresh(path: Path, header: Header) -> Journal:
    for taken in (path, records.journal_path(path)):
        if taken.exists():
            raise RecordError(
                f"{taken} exists; add --resume to go on with it, or name another --out"
            )
    return Journal(path, header, [])


def _resumed(path: Path, header: Header) -> Journal:
    """Go on with what is there, under its own id; refuse when it measured something else."""
    if not path.exists() and not records.journal_path(path).exists():
        return Journal(path, header, [])
    old, entries = records.taken_apart(load(path))
    for name, was, is_ in (
        ("model.id", old.model.id, header.model.id),
        ("software.engine", old.software.engine, header.software.engine),
        ("software.version", old.software.version, header.software.version),
    ):
        if was != is_:
            raise RecordError(
                f"{path} cannot be resumed: its {name} is {was!r} and the server's is {is_!r}; "
                "name another --out"
            )
    run = msgspec.structs.replace(old.run, status="running", ended=None)
    return Journal(path, msgspec.structs.replace(old, run=run), entries)


def _create(partial: Path, header: Header, entries: Sequence[Entry]) -> FileIO:
    """The journal's file with its first lines, open for more; an older one is replaced in one step."""
    beside = partial.with_name(partial.name + ".new")
    lines = b"".join(msgspec.json.encode(part) + b"\n" for part in (header, *entries))
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        file = beside.open("wb", buffering=0)
        _write(file, lines)
        beside.replace(partial)
        _sync_directory(partial.parent)
    except OSError as error:
        raise RecordError(
            f"cannot write {partial}: {error.strerror}; name another --out"
        ) from error
    return file


def _parse_journal(data: bytes, origin: str) -> tuple[Header, list[Entry]]:
    first, *rest = data.split(b"\n")
    records.check_version(first, origin)
    if rest:
        rest.pop()  # whole lines end in a newline, so what follows the last one is torn or empty
    try:
        header = _HEADER.decode(first)
    except msgspec.DecodeError as error:
        raise RecordError(f"{origin} is damaged: {error}") from None
    entries: list[Entry] = []
    for number, line in enumerate(rest, 2):
        try:
            entries.append(_ENTRY.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(f"{origin} is damaged at line {number}: {error}") from None
    return header, entries


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def _write(file: FileIO, data: bytes) -> None:
    """All of `data`, on the disk. Raises OSError; a nearly full disk takes a part first, so this may leave one."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    if sys.platform == "win32":
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
