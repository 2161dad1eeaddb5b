"""The command line: `onechip serve`, `generate`, `inspect`, and the ladder's commands (`ladder.cli`).

Owns the commands, the environment (read nowhere else), exit statuses and how a report is printed. The options that are
fields of a configuration come from `flags`. jax and the engine are imported inside the commands: `onechip --help`
answers without them.

Exit status: 0 done, 1 the server or a request failed, 2 a flag, file or model that cannot be served (one line on
stderr, `onechip: error: ...`), 130 interrupted.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from onechip import __version__
from onechip.config import DTypeName, EngineConfig, ServerConfig
from onechip.errors import ConfigError, OnechipError, StartupError
from onechip.flags import build, serve_arguments, with_flags
from onechip.ladder.cli import mount as mount_ladder

app = typer.Typer(
    name="onechip",
    help="Serve Gemma on one chip: TPU, GPU or CPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: importing rich costs as much as everything else
)

# One person talks: programs for more sequences would only cost time to start.
CHAT_DEFAULTS: dict[str, Any] = {"max_seqs": 1}

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A hub id, a directory, a .gguf file, or demo.")
]


@app.command()
@with_flags(EngineConfig, ServerConfig)
def serve(model: Model, **flags: Any) -> int:
    """Serve MODEL over HTTP with OpenAI's API."""
    from onechip.server.main import serve as serve_http

    return serve_http(model, build(EngineConfig, flags), build(ServerConfig, flags))


@app.command()
@with_flags(EngineConfig, precompile=False)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(help="Longest output.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0.0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens to draw from; 0 is all.", min=0)] = 0,
    top_p: Annotated[
        float, typer.Option(help="Probability mass to draw from.", min=0.0, max=1.0)
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Least probability, as a share of the best.", min=0.0, max=1.0)
    ] = 0.0,
    sampling_seed: Annotated[
        int | None, typer.Option(help="Seed of the draws.", show_default="fresh")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text to stop before; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to max-tokens.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print ids and finish reason too.")
    ] = False,
    **flags: Any,
) -> int:
    """Continue PROMPT and print the text."""
    from onechip.engine.progress import shown
    from onechip.llm import LLM
    from onechip.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=sampling_seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    with shown() as report:
        llm = LLM(model, report=report, **flags)
    done = llm.generate([prompt], params)[0]
    if as_json:
        print_json(
            {
                "text": done.text,
                "token_ids": list(done.token_ids),
                "finish_reason": done.finish_reason,
            }
        )
    else:
        typer.echo(done.text)
    return 0


@app.command()
def inspect(
    model: Model,
    chip: Annotated[
        str | None, typer.Option(help="One chip, by name.", show_default="all known")
    ] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Weights as they are held.")] = "bfloat16",
    kv_dtype: Annotated[
        DTypeName | None,
        typer.Option(help="Stored keys and values.", show_default="that of --dtype"),
    ] = None,
    max_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Print the layers of MODEL and what it costs in memory and bandwidth. Reads no weights."""
    from onechip import inspection

    found = inspection.examine(model, dtype, kv_dtype or dtype, chip, max_seqs)
    if as_json:
        print_json(inspection.as_dict(found))
    else:
        inspection.show(found)
    return 0


@app.command()
@with_flags(EngineConfig, **CHAT_DEFAULTS)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Serve this model meanwhile, with the engine flags."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to this server.", show_default="http://127.0.0.1:8000"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--model", help="Which of the server's models.", show_default="its first"),
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.", show_default=False)] = "",
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model think.")] = False,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the server.", envvar="ONECHIP_API_KEY")
    ] = None,
    **flags: Any,
) -> int:
    """Talk to a model in the terminal, or answer one message from a pipe."""
    from onechip.terminal.main import chat as talk

    if model is not None and url is not None:
        raise ConfigError("give MODEL or --url, not both; --model names a model of the server")
    engine = serve_arguments(flags)
    if model is None and engine != serve_arguments(CHAT_DEFAULTS):
        raise ConfigError(
            f"{' '.join(engine)}: engine flags are for a MODEL served here, not for a running server"
        )
    keys = (api_key or "").split()
    return talk(model, engine, url, name, system, keys[0] if keys else None, thinking=thinking)


@app.command()
def parity(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A URL, or a MODEL as for serve.")],
    got: Annotated[str, typer.Argument(metavar="GOT", help="Another of the same kind.")],
    max_tokens: Annotated[int, typer.Option(help="Greedy tokens to compare.", min=1)] = 64,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key for both servers.")
    ] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Of both checkpoints.")] = "float32",
) -> int:
    """Compare next-token probabilities and greedy answers of two servers or two checkpoints."""
    from onechip.ladder import parity as figures
    from onechip.ladder import tables

    urls = [text.startswith(("http://", "https://")) for text in (ref, got)]
    if urls[0] != urls[1]:
        raise StartupError(f"{ref} and {got} cannot be compared; give two URLs or two checkpoints")
    if urls[0]:
        from onechip.ladder.client import Target
        from onechip.ladder.http import run as finish

        first, second = (Target(url, api_key=api_key) for url in (ref, got))
        found = finish(figures.servers(first, second, max_tokens=max_tokens))
    else:
        from onechip.parity import checkpoints

        found = checkpoints(ref, got, max_tokens=max_tokens, dtype=dtype)
    typer.echo(tables.aligned(figures.rows(found)))
    return int(not all(p.argmax for p in found))


mount_ladder(app)


@app.command(name="compile")
@with_flags(
    EngineConfig,
    without=(
        "max_waiting",
        "seed",
        "compile_cache",
        "precompile",
        "programs",
        "profile",
        "profile_steps",
    ),
)
def compile_(
    model: Model,
    target: Annotated[
        str, typer.Option(help="Chip to compile for: tpu-v5e-1, tpu-v6e-1, cuda-h200 or cpu.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the record and the executables.", show_default="none"),
    ] = None,
    context: Annotated[int, typer.Option(help="Keys a row sees in the least bytes.", min=1)] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **flags: Any,
) -> int:
    """Compile every program of MODEL for a chip, which need not be here, and print what that tells."""
    from dataclasses import asdict

    from onechip import compilation
    from onechip.engine.progress import shown

    with shown() as report:
        record = compilation.compile_for(
            model,
            target,
            build(EngineConfig, flags),
            out=out,
            context=context,
            progress=report.compiling,
        )
    if as_json:
        print_json(asdict(record))
    else:
        compilation.show(record)
    return 0 if record.fits else 1


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    import json

    typer.echo(json.dumps(value, indent=1))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onechip {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve Gemma on one chip: TPU, GPU or CPU."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors a user can cause are one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        status = app(args=arguments, prog_name="onechip", standalone_mode=False)
    except StartupError as error:
        return fail(error.message, 2)
    except OnechipError as error:
        return fail(error.message, 1)
    except TyperException as error:
        return fail(error.format_message(), error.exit_code)
    except (Abort, KeyboardInterrupt):
        return 130
    return status if isinstance(status, int) else 0


def fail(message: str, status: int) -> int:
    """Say `message` on one line of stderr."""
    print("onechip: error:", " ".join(message.split()), file=sys.stderr)
    return status


def main() -> None:
    """The console script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
