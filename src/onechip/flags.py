"""The fields of the configurations as options of the command line: one table, one decorator, no second list to keep.

Every field of `EngineConfig` and `ServerConfig` is a flag of the same name, so the two cannot drift apart. Knows no
command and imports no engine.
"""

import inspect as introspection
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from onechip.config import EngineConfig, ServerConfig

Config = TypeVar("Config", EngineConfig, ServerConfig)


@dataclass(frozen=True)
class Flag:
    """What a config field does not say of itself: help, range, a name that is not the field's own.

    `default` says in words what None stands for.
    """

    help: str
    min: float | None = None
    max: float | None = None
    name: str | None = None
    envvar: str | None = None
    default: str | None = None


FLAGS = {
    "max_seqs": Flag("Sequences that run at once.", min=1),
    "max_model_len": Flag("Longest prompt plus output, in tokens.", min=2, default="what fits"),
    "dtype": Flag("Weights and arithmetic; auto is bfloat16 where the chip has it."),
    "kv_dtype": Flag("Stored keys and values; auto is the dtype of the weights."),
    "page_size": Flag("Tokens that one K/V page holds.", min=1, default="by device"),
    "chunk_size": Flag("Prompt tokens that one step takes.", min=1, default="by device"),
    "kv_tokens": Flag("Tokens of context kept, over all sequences.", min=1, default="what fits"),
    "max_waiting": Flag("Requests that may queue; one more is answered 503.", min=0),
    "random_weights": Flag(
        "Run the configuration with random weights; no checkpoint is read.", name="--random-weights"
    ),
    "seed": Flag("Seed of the random weights."),
    "attention": Flag(
        "Attention implementation: auto, plain, pallas_tpu or pallas_triton; a name is obeyed or refused."
    ),
    "scan_layers": Flag(
        "Run layers that repeat in loops: less to compile. auto is on for TPUs, where a loop copies no weights."
    ),
    "decode_steps": Flag(
        "Most decode steps of one launch, taken while nobody waits.", min=1, default="by device"
    ),
    "compile_cache": Flag("Directory of compiled programs, or off.", default="the user's cache"),
    "programs": Flag(
        "Directory of compiled programs to load, from onechip compile --out.", default="none"
    ),
    "profile": Flag("Directory for a jax.profiler trace of the first launches.", default="none"),
    "profile_steps": Flag("Launches that the trace holds.", min=1),
    "precompile": Flag(
        "Compile every program before the first answer, so that none is compiled later.",
        name="--precompile/--no-precompile",
    ),
    "host": Flag("Address to listen on."),
    "port": Flag("Port to listen on; 0 takes a free one.", min=0, max=65535),
    "served_model_names": Flag(
        "Name the API answers to; may be repeated.", name="--served-model-name", default="MODEL"
    ),
    "api_keys": Flag(
        "Key that clients must send; may be repeated (in the variable: separated by spaces).",
        name="--api-key",
        envvar="ONECHIP_API_KEY",
    ),
    "api_key_file": Flag("File of more keys, one a line; # begins a comment.", default="none"),
    "cors": Flag("Let web pages of other origins use the API.", name="--cors/--no-cors"),
    "cors_origins": Flag(
        "Origin whose pages may use the API; may be repeated.", name="--cors-origin", default="all"
    ),
    "max_body_bytes": Flag("Largest request body.", min=1),
    "request_timeout": Flag(
        "Seconds a request may take, waiting included; then it ends with an error.",
        min=0.001,
        default="no limit",
    ),
    "ping_seconds": Flag(
        "A stream without news gets a comment this often, so that proxies keep it; 0 is never.",
        min=0,
    ),
    "drain_seconds": Flag("Seconds that running answers may still take after SIGTERM.", min=0),
    "stored_responses": Flag("Responses kept for previous_response_id.", min=0),
    "stored_responses_bytes": Flag("Most memory that they may take.", min=0),
    "log_format": Flag("Log lines for people, or one JSON object a line."),
    "access_log": Flag("Log each request.", name="--access-log/--no-access-log"),
    "otlp_endpoint": Flag(
        "Send OpenTelemetry traces there (OTLP over HTTP; extra otel).",
        envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
        default="none",
    ),
}


def with_flags(
    *configs: type, without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Replace a command's **flags by one option for every field of the config classes.

    `defaults` are the command's own where they differ from the class's; fields `without` a meaning get no option.
    """

    options = [
        _option(field, defaults)
        for config in configs
        for field in fields(config)
        if field.name not in without
    ]
    return partial(with_options, options=options)


def with_options(
    command: Callable[..., int], options: Iterable[introspection.Parameter]
) -> Callable[..., int]:
    """Replace a command's **keywords, as typer sees them, by these options."""
    signature = introspection.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # pyright: ignore[reportFunctionMemberAccess]
    return command


def _option(field: Field[Any], defaults: Mapping[str, Any]) -> introspection.Parameter:
    flag = FLAGS[field.name]
    name = flag.name or "--" + field.name.replace("_", "-")
    option = typer.Option(
        name,
        help=flag.help,
        min=flag.min,
        max=flag.max,
        envvar=flag.envvar,
        show_default=flag.default or True,
    )
    repeated = field.type == tuple[str, ...]
    return introspection.Parameter(
        field.name,
        introspection.Parameter.KEYWORD_ONLY,
        default=None if repeated else defaults.get(field.name, field.default),
        annotation=Annotated[list[str] | None if repeated else field.type, option],
    )


def build(config: type[Config], flags: Mapping[str, Any]) -> Config:
    """The config object whose fields are among `flags`; a repeated flag becomes a tuple."""
    known = [field for field in fields(config) if field.name in flags]
    values: dict[str, Any] = {field.name: flags[field.name] for field in known}
    for field in known:
        if field.type == tuple[str, ...]:
            values[field.name] = tuple(values[field.name] or ())
    return config(**values)


def serve_arguments(flags: Mapping[str, Any]) -> list[str]:
    """The engine flags that differ from the defaults of `serve`, as `serve` takes them."""
    found: list[str] = []
    for field in fields(EngineConfig):
        value, name = (
            flags.get(field.name, field.default),
            FLAGS[field.name].name or "--" + field.name.replace("_", "-"),
        )
        if value == field.default:
            continue
        on, _, off = name.partition("/")
        found += [on if value else off] if isinstance(value, bool) else [on, str(value)]
    return found
