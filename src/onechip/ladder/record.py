"""What a measurement leaves behind: one JSON file of one versioned shape.

Owns the shape, how it is read and checked, and what "the same work" means (`Workload`). How it gets to disk while a
measurement runs is `journal`.

A record says what was run (`run`, `software`, `model`, `hardware`), what was measured (`cells`, `evals` with every
answer in `items`, `probes`, `memory`, `startup`) and what went wrong (a status on each, `issues`). Raw repeats are kept
beside every figure, so a reader can compute each one again.

Units: seconds end in `_s`, milliseconds in `_ms`, tokens per second in `tok_per_s`. All times of day are UTC, ISO 8601.
A later version may add fields, which readers of this one ignore; it raises `SCHEMA_VERSION` when the meaning of an old
one changes, and then this reader refuses.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from onechip.errors import StartupError
from onechip.ladder.stream import Failure

SCHEMA = "onechip.ladder"
SCHEMA_VERSION = 1

RunStatus = Literal["running", "done", "interrupted", "failed"]
CellStatus = Literal["ok", "infeasible", "failed", "missing"]
Verdict = Literal["pass", "fail", "unsupported", "error"]
Figures = dict[str, float]


class RecordError(StartupError):
    """A record cannot be read, written or compared."""


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all parts: immutable, fields by name, defaults left out of the file."""


class Run(Part, frozen=True, kw_only=True):
    """`id` names the run for ever, `command` is what the user typed, `status` how it ended."""

    id: str
    date: str
    status: RunStatus
    ended: str | None = None
    command: tuple[str, ...] = ()
    arm: str | None = None


class Hardware(Part, frozen=True, kw_only=True):
    """`price_per_hour` (all chips together) is what costs are computed from."""

    accelerator: str | None = None
    chips: int = 1
    topology: str | None = None
    host_cpu: str | None = None
    host_cores: int | None = None
    host_memory_gib: float | None = None
    price_per_hour: float | None = None
    currency: str = "USD"


class Model(Part, frozen=True, kw_only=True):
    id: str
    weights: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    digest: str | None = None


class Software(Part, frozen=True, kw_only=True):
    """The server as it tells of itself or as its arm describes it. `client` is this package's version."""

    engine: str | None = None
    version: str | None = None
    serve_args: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    image_digest: str | None = None
    url: str | None = None
    client: str | None = None
    client_python: str | None = None


class Workload(Part, frozen=True, kw_only=True):
    """What a cell asked for; two cells measure the same work when these are equal.

    kind: `one` (six chat prompts), `closed` (`concurrency` requests at a time) or `open` (arrivals at `rate` a second).
    """

    kind: Literal["one", "closed", "open"]
    input_len: int | None = None
    output_len: int
    concurrency: int | None = None
    requests: int | None = None
    rate: float | None = None
    burstiness: float | None = None
    endpoint: Literal["completions", "chat"] = "completions"


class Request(Part, frozen=True, kw_only=True):
    """One timed request: seconds from `sent`, which is itself seconds from the start of its repeat."""

    sent_s: float
    ttft_s: float | None = None
    finish_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    prompt: str | None = None
    text_sha256: str | None = None
    error: Failure | None = None


class Repeat(Part, frozen=True, kw_only=True):
    """One pass over the workload. `wall_s` is first send to last finish chunk.

    `gaps_ms` counts the gaps between text chunks, (gap to three digits, how often).
    """

    wall_s: float
    output_tokens: int
    requests: tuple[Request, ...] = ()
    gaps_ms: tuple[tuple[float, int], ...] = ()


class ClientCost(Part, frozen=True, kw_only=True):
    """The measuring process while the cell ran: its share of one core, how late its loop was, chunks it read."""

    cpu_share: float
    lag_ms_p50: float
    lag_ms_max: float
    chunks_per_s: float


class Cell(Part, frozen=True, kw_only=True, tag="cell"):
    """One measured point. `figures` are medians and ratios by name, `percentiles` p50 to p99 by metric.

    `prompts` says how their length was made (`exact`: counted by /tokenize; `calibrated`: from usage; `fixed`: texts)
    and `seed` what they were drawn with;
    `texts` keeps the answers that are compared between servers, `targets_ms` what goodput was counted against.
    """

    workload: Workload
    status: CellStatus
    reason: str | None = None
    repeats: tuple[Repeat, ...] = ()
    figures: Figures = {}
    percentiles: dict[str, Figures] = {}
    errors: tuple[Failure, ...] = ()
    client: ClientCost | None = None
    notes: tuple[str, ...] = ()
    prompts: Literal["exact", "calibrated", "fixed"] | None = None
    seed: int | None = None
    targets_ms: Figures = {}
    texts: dict[str, str] = {}


class Item(Part, frozen=True, kw_only=True, tag="item"):
    """One question of an eval and its answer as it came, so that scores can be computed again."""

    task: str
    id: str
    right: bool
    verdict: str
    expected: Any = None
    got: Any = None
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, str], ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    latency_s: float | None = None
    error: Failure | None = None


class Eval(Part, frozen=True, kw_only=True, tag="eval"):
    """An eval's settings and totals. `settings` must be equal for two records to be compared."""

    task: str
    status: CellStatus
    settings: dict[str, Any] = {}
    figures: Figures = {}
    reason: str | None = None


class Probe(Part, frozen=True, kw_only=True, tag="probe"):
    """One capability with its verdict; `detail` says what was seen."""

    domain: str
    name: str
    verdict: Verdict
    detail: str = ""
    latency_s: float | None = None
    answer: dict[str, Any] = {}


class Memory(Part, frozen=True, kw_only=True, tag="memory"):
    """What the server or its arm says; None where nobody said."""

    weights_gib: float | None = None
    device_in_use_gib: float | None = None
    host_rss_gib: float | None = None
    kv_bytes_per_token: float | None = None
    resident_kv_tokens: int | None = None


class Startup(Part, frozen=True, kw_only=True, tag="startup"):
    """Seconds from launch. `first_answer_s` is the one that counts."""

    healthy_s: float | None = None
    first_answer_s: float | None = None
    compile_s: float | None = None


class Issue(Part, frozen=True, kw_only=True, tag="issue"):
    """Something a reader must know: what was refused, missing or odd."""

    text: str


Entry = Cell | Item | Eval | Probe | Memory | Startup | Issue


class Header(Part, frozen=True, kw_only=True, tag="header"):
    """The first line of a journal: everything known before the first measurement."""

    schema: str
    schema_version: int
    run: Run
    hardware: Hardware
    model: Model
    software: Software


class Record(Part, frozen=True, kw_only=True):
    """The whole file. `cells`, `items`, `evals` and `probes` have one entry a key: the newest that was written."""

    schema: str
    schema_version: int
    run: Run
    hardware: Hardware
    model: Model
    software: Software
    cells: tuple[Cell, ...] = ()
    evals: tuple[Eval, ...] = ()
    items: tuple[Item, ...] = ()
    probes: tuple[Probe, ...] = ()
    memory: Memory | None = None
    startup: Startup | None = None
    issues: tuple[str, ...] = ()

    def cell(self, workload: Workload) -> Cell | None:
        return next((cell for cell in self.cells if cell.workload == workload), None)

    def items_of(self, task: str) -> dict[str, Item]:
        return {item.id: item for item in self.items if item.task == task}


def assemble(header: Header, entries: list[Entry]) -> Record:
    """The record of a header and the entries in the order they were written; a later one replaces its like."""
    last = {_identity(entry): entry for entry in entries}

    def of(kind: type[Any]) -> tuple[Any, ...]:
        return tuple(entry for entry in last.values() if isinstance(entry, kind))

    return Record(
        schema=header.schema,
        schema_version=header.schema_version,
        run=header.run,
        hardware=header.hardware,
        model=header.model,
        software=header.software,
        cells=of(Cell),
        evals=of(Eval),
        items=of(Item),
        probes=of(Probe),
        memory=next(iter(of(Memory)), None),
        startup=next(iter(of(Startup)), None),
        issues=tuple(issue.text for issue in of(Issue)),
    )


def taken_apart(record: Record) -> tuple[Header, list[Entry]]:
    """The inverse of `assemble`."""
    header = Header(
        schema=record.schema,
        schema_version=record.schema_version,
        run=record.run,
        hardware=record.hardware,
        model=record.model,
        software=record.software,
    )
    entries: list[Entry] = [*record.cells, *record.evals, *record.items, *record.probes]
    entries += [part for part in (record.memory, record.startup) if part is not None]
    entries += [Issue(text=text) for text in record.issues]
    return header, entries


def _identity(entry: Entry) -> Any:
    match entry:
        case Cell():
            return msgspec.json.encode(entry.workload)
        case Item():
            return "item", entry.task, entry.id
        case Eval():
            return "eval", entry.task
        case Probe():
            return "probe", entry.domain, entry.name
        case Issue():
            return "issue", entry.text
        case _:
            return type(entry).__name__


class _Version(msgspec.Struct):
    schema: str | None = None
    schema_version: int | None = None


def check_version(data: bytes, origin: str) -> None:
    """Raises RecordError unless `data` starts a record that this version can read."""
    try:
        found = msgspec.json.decode(data, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{origin} is no record: {error}") from None
    if found.schema != SCHEMA or found.schema_version is None:
        raise RecordError(
            f"{origin} is no record of this ladder: its schema is {found.schema!r}, not {SCHEMA!r}"
        )
    if found.schema_version > SCHEMA_VERSION:
        raise RecordError(
            f"{origin} has schema version {found.schema_version}, and this onechip reads up to "
            f"{SCHEMA_VERSION}; install a newer onechip"
        )


def parse(data: bytes, origin: str) -> Record:
    """A record from its bytes. Raises RecordError naming the field at fault."""
    check_version(data, origin)
    try:
        return msgspec.json.decode(data, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{origin} is damaged: {error}") from None


def dump(record: Record) -> bytes:
    """The bytes of a record file: a line for each field, and in a list for each entry."""
    lines: list[bytes] = []
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value is None or value == ():
            continue
        said = msgspec.json.encode(value)
        if isinstance(value, tuple):
            said = b"[\n  " + b",\n  ".join(map(msgspec.json.encode, value)) + b"\n ]"
        lines.append(b" %s: %s" % (msgspec.json.encode(name), said))
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def json_schema() -> bytes:
    """The shape of a record file as JSON Schema, for readers in other languages; docs/record.schema.json is this."""
    schema = msgspec.json.schema(Record)
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted"), indent=1) + b"\n"


def journal_path(path: Path) -> Path:
    """Where a record that is still being made lives."""
    return path.with_name(path.name + ".partial")
