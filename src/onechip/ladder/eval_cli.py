"""The commands `onechip eval gsm8k|bfcl|probes|rescore` and `onechip ladder run|arms`.

Owns their flags and what they print; the frame they share with `bench` is `ladder.cli`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onechip.errors import ConfigError
from onechip.ladder import cli
from onechip.ladder.cli import (
    Accelerator,
    ApiKey,
    Chips,
    EndpointName,
    IgnoreEos,
    Price,
    Timeout,
    Url,
)

if TYPE_CHECKING:
    from onechip.ladder.arm import Arm
    from onechip.ladder.jobs import Job, Questions
    from onechip.ladder.tasks import Thinking

evals = typer.Typer(
    help="Ask any OpenAI-compatible server questions with known answers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
ladder = typer.Typer(
    help="Start servers in turn and measure each the same way.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

JOBS = ("one", "sweep", "gsm8k", "bfcl", "probes")

Limit = Annotated[
    int | None, typer.Option(help="Ask only so many questions, the first ones.", min=1)
]
AtOnce = Annotated[int, typer.Option("--concurrency", "-c", help="Requests in flight.", min=1)]
Gate = Annotated[
    float,
    typer.Option(
        help="Least accuracy on the first 50; below it the run stops. 0 never stops.", min=0, max=1
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Longest answer.", min=1, show_default="as published")
]
ThinkingMode = Annotated[
    str, typer.Option("--thinking", help="on, off, or unset: say nothing of it.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Folder of fetched questions.", show_default="the user's cache")
]


@evals.command("gsm8k")
@cli.with_server
def eval_gsm8k(
    url: Url,
    data: Annotated[
        Path | None, typer.Option(help="The published test.jsonl.", show_default="from the hub")
    ] = None,
    limit: Limit = None,
    concurrency: AtOnce = 1,
    gate: Gate = 0.25,
    max_tokens: MaxTokens = None,
    thinking: ThinkingMode = "off",
    endpoint: EndpointName = None,
    cache: Cache = None,
    **server: Any,
) -> int:
    """Grade-school mathematics: 1,319 questions, greedy, the number on the last line."""
    from onechip.ladder import jobs

    asked = _questions(data, cache, limit, concurrency, gate, max_tokens, thinking, endpoint)
    job = jobs.gsm8k_job(asked, say)
    return cli.measured(*cli.server_of(url, kind="gsm8k", **server), job)


@evals.command("bfcl")
@cli.with_server
def eval_bfcl(
    url: Url,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with BFCL's question files.", show_default="package bfcl-eval"),
    ] = None,
    limit: Limit = None,
    concurrency: AtOnce = 1,
    gate: Gate = 0.25,
    max_tokens: MaxTokens = None,
    thinking: ThinkingMode = "off",
    cache: Cache = None,
    **server: Any,
) -> int:
    """Function calls: BFCL simple, 400 questions, judged as the official checker does."""
    from onechip.ladder import jobs

    asked = _questions(data, cache, limit, concurrency, gate, max_tokens, thinking, None)
    job = jobs.bfcl_job(asked, say)
    return cli.measured(*cli.server_of(url, kind="bfcl", **server), job)


@evals.command("probes")
@cli.with_server
def eval_probes(
    url: Url,
    group: Annotated[
        list[str] | None,
        typer.Option(help="tools, schemas or text; may be repeated.", show_default="all"),
    ] = None,
    **server: Any,
) -> int:
    """Capabilities: tools, schemas in every spelling, reasoning, greedy identity, recall, pictures."""
    from onechip.ladder import jobs

    unknown = set(group or ()) - set(jobs.PROBES)
    if unknown:
        raise ConfigError(f"--group {unknown.pop()!r} is none of {', '.join(jobs.PROBES)}")
    job = jobs.probes_job(tuple(group or jobs.PROBES))
    return cli.measured(*cli.server_of(url, kind="probes", **server), job)


@evals.command("rescore")
def eval_rescore(
    record: Annotated[Path, typer.Argument(help="A record with answers.")],
    out: Annotated[
        Path | None, typer.Option(help="Write the new record there.", show_default="nowhere")
    ] = None,
) -> int:
    """Score the answers of a record again, without server or data; says which verdicts changed."""
    from onechip.ladder import evaluation, journal, tables

    again, changed = evaluation.rescored(journal.load(record))
    for old, new in changed:
        typer.echo(f"{new.task} {new.id}: {old.verdict} -> {new.verdict} ({new.got})")
    typer.echo(tables.aligned(tables.eval_table(again.evals)))
    typer.echo(f"{len(changed)} of {len(again.items)} verdicts changed")
    if out is not None:
        journal.write_record(out, again)
    return 0


@ladder.command("arms")
def ladder_arms() -> int:
    """List the shipped arms, what they need and what of them was never tried."""
    from onechip.ladder import arm

    for name in arm.shipped():
        found = arm.described(name)
        words = [f"{key} (required)" if key in found.required else key for key in found.settings]
        lines = [found.about, found.needs, f"--set {', '.join(words)}"]
        typer.echo("\n  ".join([name, *filter(None, lines)]) + "\n")
    return 0


@ladder.command("run")
def ladder_run(
    arms: Annotated[list[str], typer.Argument(help="Shipped arms by name, or .toml files.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE, or ARM.KEY=VALUE for one arm; may be repeated."),
    ] = None,
    jobs: Annotated[str, typer.Option(help="Of one, sweep, gsm8k, bfcl, probes.")] = "one,sweep",
    out: Annotated[Path, typer.Option(help="Folder of the records and logs.")] = Path("ladder"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the records there.")] = False,
    shape: Annotated[
        list[str] | None, typer.Option(help="sweep: IN/OUT tokens; may be repeated.")
    ] = None,
    load: Annotated[
        list[int] | None, typer.Option("--load", help="sweep: requests at once.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="sweep: timed passes.", min=1)] = 5,
    one_tokens: Annotated[int, typer.Option(help="one: tokens per answer.", min=2)] = 256,
    ignore_eos: IgnoreEos = True,
    gsm8k_data: Annotated[Path | None, typer.Option(help="gsm8k: the test.jsonl.")] = None,
    bfcl_data: Annotated[Path | None, typer.Option(help="bfcl: folder of question files.")] = None,
    limit: Limit = None,
    concurrency: AtOnce = 1,
    gate: Gate = 0.25,
    max_tokens: MaxTokens = None,
    thinking: ThinkingMode = "off",
    endpoint: EndpointName = None,
    cache: Cache = None,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    accelerator: Accelerator = None,
    chips: Chips = 1,
    price: Price = None,
) -> int:
    """Start each arm's server, do the jobs against that one start, stop it; one record an arm."""
    from onechip.ladder import climb
    from onechip.ladder.facts import this_host
    from onechip.ladder.jobs import SpeedSettings, chosen
    from onechip.ladder.progress import shown

    loaded = _arms(arms, settings or [])
    speed = SpeedSettings(
        tuple(map(cli.parse_shape, shape or ())),
        tuple(load or ()),
        repeats,
        one_tokens,
        ignore_eos,
        cli.endpoint_named(endpoint),
    )
    asked = _questions(None, cache, limit, concurrency, gate, max_tokens, thinking, endpoint)
    todo: dict[str, Job] = chosen(_named(jobs), speed, asked, gsm8k_data, bfcl_data, say)
    plan = climb.Climb(
        folder=out, jobs=todo, hardware=this_host(accelerator, chips, price), environment=cli.environment(),
        command=cli.public(sys.argv), resume=resume, timeout=timeout, api_key=api_key,
    )  # fmt: skip
    with shown() as progress:
        failures = climb.climb(loaded, plan, progress, say)
    for failure in failures:
        say(failure)
    typer.echo(f"records: {out}")
    return int(bool(failures))


def say(text: str) -> None:
    """A line for the user beside the bar."""
    print("onechip:", text, file=sys.stderr)


def _named(jobs: str) -> list[str]:
    names = [name.strip() for name in jobs.split(",") if name.strip()]
    wrong = next((name for name in names if name not in JOBS), None)
    if wrong is not None or not names:
        raise ConfigError(f"--jobs {jobs!r}: give some of {', '.join(JOBS)}, separated by commas")
    return names


def _arms(names: list[str], settings: list[str]) -> "list[Arm]":
    """Every arm with the settings that are for it; one that no arm has is an error."""
    from onechip.ladder import arm

    pairs = [text.partition("=") for text in settings]
    for key, equals, _ in pairs:
        if not equals or not key:
            raise ConfigError(f"--set {key!r} is not KEY=VALUE or ARM.KEY=VALUE")
    known = {name: arm.described(name).settings for name in names}
    for key, _, _ in pairs:
        if not any(_for_arm(key, name, known[name]) for name in names):
            raise ConfigError(f"--set {key}: no arm of {', '.join(names)} has such a setting")
    return [
        arm.load(
            name,
            {
                found: value
                for key, _, value in pairs
                if (found := _for_arm(key, name, known[name]))
            },
        )
        for name in names
    ]


def _for_arm(key: str, name: str, known: "tuple[str, ...]") -> str | None:
    """The setting that `key` means for the arm `name`, if any."""
    own, _, rest = key.partition(".")
    if rest:
        return rest if own == Path(name).stem and rest in known else None
    return key if key in known else None


def _questions(
    data: Path | None, cache: Path | None, limit: int | None, concurrency: int, gate: float,
    max_tokens: int | None, thinking: str, endpoint: str | None,
) -> "Questions":  # fmt: skip
    from onechip.ladder.evaluation import Plan
    from onechip.ladder.jobs import Questions

    return Questions(
        data=data,
        cache=cache or Path.home() / ".cache" / "onechip",
        limit=limit,
        max_tokens=max_tokens,
        thinking=_thinking(thinking),
        endpoint=cli.endpoint_named(endpoint),
        plan=Plan(concurrency, gate),
    )


def _thinking(name: str) -> "Thinking":
    if name in ("on", "off", "unset"):
        return name
    raise ConfigError(f"--thinking {name!r} is none of on, off, unset")
