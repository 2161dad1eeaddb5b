"""The ladder's commands: `onechip bench one|sweep`, `compare` and `report`; `eval_cli` has the others.

Owns flags and what is printed. Nothing but typer is imported before a command runs, so `onechip bench --help` answers
at once; no command here imports jax.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onechip.errors import ConfigError
from onechip.flags import with_options

if TYPE_CHECKING:
    from onechip.ladder.bench import Bench, Place
    from onechip.ladder.client import Target
    from onechip.ladder.prompts import Endpoint

bench = typer.Typer(
    help="Measure the speed of any OpenAI-compatible server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://host:8000.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Model to ask for.", show_default="the first listed")
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key to send as a bearer token.")
]
Headers = Annotated[
    list[str] | None, typer.Option("--header", help="NAME: VALUE to send; may be repeated.")
]
Timeout = Annotated[float, typer.Option(help="Longest that one request may take, in seconds.")]
Out = Annotated[
    Path | None, typer.Option(help="The record to write.", show_default="KIND-DATE.json")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the record at --out; measured cells are kept.")
]
EndpointName = Annotated[
    str | None,
    typer.Option("--endpoint", help="chat or completions.", show_default="what the server takes"),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for exactly the output length."),
]
Accelerator = Annotated[str | None, typer.Option(help="Chip of the server, for the record.")]
Chips = Annotated[int, typer.Option(help="How many chips the server has.", min=1)]
Price = Annotated[
    float | None, typer.Option("--price-per-hour", help="Of all chips, for cost per token.")
]


SERVER_OPTIONS: dict[str, tuple[Any, Any]] = {
    "model": (ModelName, None),
    "api_key": (ApiKey, None),
    "header": (Headers, None),
    "timeout": (Timeout, 600.0),
    "out": (Out, None),
    "resume": (Resume, False),
    "accelerator": (Accelerator, None),
    "chips": (Chips, 1),
    "price": (Price, None),
}


def with_server(command: Callable[..., int]) -> Callable[..., int]:
    """Replace a command's **server by the options that every measurement of a server has."""
    return with_options(
        command,
        (
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in SERVER_OPTIONS.items()
        ),
    )


@bench.command("one")
@with_server
def bench_one(
    url: Url,
    max_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=2)] = 256,
    repeats: Annotated[int, typer.Option(help="Timed passes.", min=1)] = 3,
    at_once: Annotated[int, typer.Option(help="Requests in the concurrent pass.", min=2)] = 4,
    endpoint: EndpointName = None,
    ignore_eos: IgnoreEos = True,
    **server: Any,
) -> int:
    """Six chat prompts, greedy, one at a time and four at once: how fast one person is answered."""
    from onechip.ladder import one

    settings = one.OneSettings(max_tokens, repeats, at_once, endpoint_named(endpoint), ignore_eos)
    return measured(*server_of(url, **server), lambda run: one.measure(run, settings))


@bench.command("sweep")
@with_server
def bench_sweep(
    url: Url,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="IN/OUT tokens; may be repeated.", show_default="512/128 128/512"),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", "-c", help="Requests in flight.", show_default="1 to 64"),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Timed passes.", min=1, show_default="5; open load 1")
    ] = None,
    waves: Annotated[
        int, typer.Option(help="Requests a pass, as a multiple of the concurrency.", min=1)
    ] = 1,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Open load: arrivals a second; may be repeated.", min=0.001),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Of arrivals: 1 is Poisson, less comes in bursts.", min=0.01)
    ] = 1.0,
    requests: Annotated[int, typer.Option(help="Open load: requests a pass.", min=1)] = 100,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="METRIC:MS a request must meet (ttft, tpot, e2e); may be repeated."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the prompts.", show_default="a new one a run")
    ] = None,
    endpoint: EndpointName = None,
    ignore_eos: IgnoreEos = True,
    **server: Any,
) -> int:
    """Throughput and latency by shape and load, closed (--concurrency) or open (--rate)."""
    from onechip.ladder import sweep

    settings = sweep.SweepSettings(
        shapes=tuple(map(parse_shape, shape)) if shape else sweep.SHAPES,
        concurrencies=tuple(concurrency or sweep.CONCURRENCIES),
        repeats=repeats or (1 if rate else 5),
        waves=waves,
        rates=tuple(rate or ()),
        burstiness=burstiness,
        requests=requests,
        targets_ms=dict(map(parse_target, goodput or ())),
        endpoint=endpoint_named(endpoint),
        ignore_eos=ignore_eos,
        seed=seed,
    )
    if settings.targets_ms and not settings.rates:
        raise ConfigError("--goodput counts requests of an open load; add --rate")
    return measured(*server_of(url, **server), lambda run: sweep.measure(run, settings))


RecordPath = Annotated[Path, typer.Argument(metavar="RECORD", help="A record, or its .partial.")]
Seed = Annotated[int, typer.Option(help="Of the bootstrap.")]


def compare_records(
    ours: RecordPath,
    theirs: RecordPath,
    seed: Seed = 0,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=100)] = 2000,
    flips: Annotated[
        bool, typer.Option("--flips", help="List the questions that flipped.")
    ] = False,
) -> int:
    """Say what the difference between two records of the same work is worth."""
    from onechip.ladder import compare, journal, tables

    found = compare.compare(
        journal.load(ours), journal.load(theirs), seed=seed, resamples=resamples
    )
    if found.cells:
        typer.echo(tables.aligned(compare.rows_of_cells(found)))
    if found.evals:
        typer.echo(tables.aligned(compare.rows_of_evals(found)))
    for each in found.evals if flips else ():
        typer.echo(f"{each.task} won: {' '.join(each.won) or '-'}")
        typer.echo(f"{each.task} lost: {' '.join(each.lost) or '-'}")
    if found.texts:
        typer.echo(f"equal texts: {found.texts['equal']} of {found.texts['prompts']}")
    for line in found.skipped:
        typer.echo(f"not compared: {line}", err=True)
    return 0


def report_records(
    records: Annotated[
        list[Path], typer.Argument(metavar="RECORD...", help="The first is held against.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")] = Path("report"),
    draw: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw PNG and SVG.")] = True,
) -> int:
    """Write a report of one or more records: Markdown, one HTML page and plots."""
    from onechip.ladder import journal, report

    made = report.make([journal.load(path) for path in records], draw=draw)
    for path in report.write(made, out):
        typer.echo(path)
    return 0


def mount(app: typer.Typer) -> None:
    """Add the ladder's commands to the command line."""
    from onechip.ladder.eval_cli import evals, ladder

    app.add_typer(bench, name="bench")
    app.command("compare")(compare_records)
    app.command("report")(report_records)
    app.add_typer(evals, name="eval")
    app.add_typer(ladder, name="ladder")


def parse_shape(text: str) -> tuple[int, int]:
    """IN/OUT. Raises ConfigError."""
    given, _, made = text.partition("/")
    if not (given.isdecimal() and made.isdecimal() and int(given) > 0 and int(made) > 0):
        raise ConfigError(f"--shape {text!r} is not IN/OUT in tokens, such as 512/128")
    return int(given), int(made)


def parse_target(text: str) -> tuple[str, float]:
    """METRIC:MS. Raises ConfigError."""
    metric, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError:
        value = -1.0
    if metric not in ("ttft", "tpot", "e2e") or value <= 0:
        raise ConfigError(
            f"--goodput {text!r} is not ttft, tpot or e2e with milliseconds, such as ttft:200"
        )
    return metric, value


def endpoint_named(name: str | None) -> "Endpoint | None":
    if name in ("chat", "completions") or name is None:
        return name
    raise ConfigError(f"--endpoint {name!r} is neither chat nor completions")


def server_of(
    url: str,
    *,
    model: str | None,
    api_key: str | None,
    header: list[str] | None,
    timeout: float,
    kind: str = "bench",
    **place: Any,
) -> "tuple[Target, Place]":
    """What `with_server`'s options describe; `kind` names a record that --out does not."""
    return target_of(url, model, api_key, header, timeout), place_of(**place, kind=kind)


def target_of(
    url: str, model: str | None, key: str | None, headers: list[str] | None, timeout: float
) -> "Target":
    from onechip.ladder.client import Target

    pairs = [line.partition(":")[::2] for line in headers or ()]
    named = {name.strip(): value.strip() for name, value in pairs}
    return Target(url, model, key, named, timeout)


def place_of(
    out: Path | None,
    resume: bool,
    accelerator: str | None,
    chips: int,
    price: float | None,
    kind: str = "bench",
) -> "Place":
    """Where a run is recorded: --out, or a new file in the working directory named for `kind`."""
    from datetime import UTC, datetime

    from onechip.ladder.bench import Place
    from onechip.ladder.facts import this_host

    if resume and out is None:
        raise ConfigError("--resume needs --out: the record to go on with")
    out = out or Path(f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    hardware = this_host(accelerator, chips, price)
    return Place(out=out, resume=resume, command=public(sys.argv), hardware=hardware)


def environment() -> dict[str, str]:
    """What a server that an arm starts inherits."""
    return dict(os.environ)


def public(argv: list[str]) -> tuple[str, ...]:
    """The command line as a record keeps it: without keys and headers."""
    kept: list[str] = []
    hide = False
    for word in argv:
        secret = word.startswith(("--api-key", "--header"))
        if hide:
            kept.append("***")
        elif secret and "=" in word:
            kept.append(word.partition("=")[0] + "=***")
        else:
            kept.append(word)
        hide = secret and "=" not in word
    return ("onechip", *kept[1:])


def measured(target: "Target", place: "Place", work: "Callable[[Bench], Awaitable[object]]") -> int:
    """Run one measurement with a bar, then print what the record holds. 0, or 1 when a cell is not ok."""
    from onechip.ladder import journal, tables
    from onechip.ladder.bench import opened
    from onechip.ladder.http import run
    from onechip.ladder.progress import shown

    async def measuring() -> None:
        with shown() as progress:
            async with opened(target, place, progress) as bench_run:
                await work(bench_run)

    try:
        run(measuring())
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {place.out}", file=sys.stderr)
        raise
    record = journal.load(place.out)
    typer.echo(tables.printed(record))
    typer.echo(f"\nrecord: {place.out}")
    parts = (*record.cells, *record.evals)
    return int(any(part.status in ("failed", "missing") for part in parts))
