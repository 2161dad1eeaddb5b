"""What the API supports, field by field: read from the request models themselves, written as docs/api.md.

A field is honoured, a label (accepted, without effect, for the client's own accounting) or refused (400 with the
reason); every other name is an unknown field (400 that lists all of them). `meanings` says in one line what an honoured
field does; tests hold the page against the models, and the models against the server.

    make docs
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from onechip.server import messages_body, responses_body, schema
from onechip.server.meanings import MEANINGS

Status = Literal["honoured", "label", "refused"]


@dataclass(frozen=True)
class Route:
    path: str
    body: type[BaseModel]
    text: str
    deep: bool = True  # whether to list what is inside its fields, too


@dataclass(frozen=True)
class Row:
    """One field of one body. `path` begins at the route's body; `model` is where it is declared."""

    path: str
    model: type[BaseModel]
    name: str
    status: Status
    text: str
    required: bool


ROUTES = (
    Route(
        "POST /v1/chat/completions",
        schema.ChatBody,
        "OpenAI's chat completions, with vLLM's extensions. A thought is `reasoning` (and `reasoning_content`).",
    ),
    Route(
        "POST /v1/completions",
        schema.CompletionBody,
        "OpenAI's completions: text or ids are continued as they are.",
    ),
    Route(
        "POST /v1/responses",
        responses_body.ResponsesBody,
        "OpenAI's Responses. `GET` and `DELETE /v1/responses/{id}` and `GET /v1/responses/{id}/input_items` read and "
        "forget what is stored, in memory, within `--stored-responses` and `--stored-responses-bytes`.",
    ),
    Route(
        "POST /v1/messages",
        messages_body.MessagesBody,
        "Anthropic's messages. The key may come as `x-api-key`; `anthropic-version` and `anthropic-beta` mean nothing.",
    ),
    Route(
        "POST /v1/messages/count_tokens",
        messages_body.CountBody,
        "How many tokens the prompt of such a message has; inside, the fields are the same.",
        deep=False,
    ),
    Route("POST /tokenize", schema.TokenizeBody, "vLLM's: a prompt or messages to ids."),
    Route("POST /detokenize", schema.DetokenizeBody, "vLLM's: ids to text."),
)
OTHERS = (
    ("GET /v1/models, /v1/models/{id}", "the served names"),
    ("GET /health/live", "503 only when the engine is dead: restart the process"),
    ("GET /health/ready, /health, /ping", "200 when a request would be taken now"),
    ("GET /metrics", "Prometheus: every number as `onechip_...` and under vLLM's name `vllm:...`"),
    ("GET /version", "this server's version"),
)
HEAD = """\
# The API, field by field

Made from the code by `make docs`; a test fails when it is out of date.

- **honoured**: it does what its API says, or the request is a 400 that says why not.
- **label**: accepted without effect; it is for the client's or the provider's own accounting.
- **refused**: known, and a 400 with the reason, unless it is null or asks for nothing (the values named).
- Any other field is a 400 that names all unknown ones, at every level.

Errors are `{"error": {"message", "type", "param", "code"}}`, under /v1/messages Anthropic's
`{"type": "error", "error": {"type", "message"}, "request_id"}`. Every answer carries `x-request-id`. 503 (not up,
overloaded, shutting down) comes with `Retry-After`. In a stream, an error after the first byte is an event, and a
comment (an Anthropic `ping` event) every `--ping-seconds` keeps a silent stream alive.
"""


def status_of(field: FieldInfo) -> tuple[Status, str]:
    """What becomes of a field, and for a refused one why."""
    if field.annotation is NoneType:
        return "refused", "only null"
    for mark in field.metadata:
        if isinstance(mark, schema.Label):
            return "label", ""
        if isinstance(mark, BeforeValidator) and isinstance(mark.func, schema.Refusal):
            return "refused", _why(mark.func)
    return "honoured", ""


def _why(refusal: schema.Refusal) -> str:
    passing = ", ".join(f"`{json.dumps(value)}`" for value in refusal.harmless)
    return refusal.reason + (f" (passes: {passing})" if passing else "")


def rows(body: type[BaseModel], path: str = "") -> Iterator[Row]:
    """Every field of a body, each followed by those of what it contains. A `type` that the path tells is left out."""
    for name, field in body.model_fields.items():
        shown = field.alias or name
        if path and shown == "type" and _tag(body):
            continue
        status, why = status_of(field)
        text = why or (meaning(body, shown, top=not path) if status == "honoured" else "")
        yield Row(path + shown, body, shown, status, text, field.is_required())
        for inner, suffix in _inside(field.annotation):
            yield from rows(inner, f"{path}{shown}{suffix}.")


def meaning(body: type[BaseModel], name: str, *, top: bool) -> str:
    """The line of the closest class that has one; a route's own field may have one under its bare name."""
    keys = [key for kind in body.__mro__ for key in _keys(kind, name)] + [name] * top
    return next((MEANINGS[key] for key in keys if key in MEANINGS), "")


def _keys(kind: type, name: str) -> tuple[str, str]:
    """Where two modules have a class of one name, the module tells them apart."""
    module = kind.__module__.rpartition(".")[2]
    return f"{module}.{kind.__name__}.{name}", f"{kind.__name__}.{name}"


def _inside(annotation: Any, suffix: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """The models within an annotation; those in a list have [] after their field, unions their `type` in brackets."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, suffix + _tag(annotation)
        return
    inner = suffix + ("[]" if getattr(annotation, "__origin__", None) is list else "")
    for argument in get_args(annotation):
        yield from _inside(argument, inner)


def _tag(model: type[BaseModel]) -> str:
    """`(text)` for a model that is told from others by its type."""
    field = model.model_fields.get("type")
    values = get_args(field.annotation) if field is not None and field.is_required() else ()
    return f"({values[0]})" if len(values) == 1 and isinstance(values[0], str) else ""


def page() -> str:
    """docs/api.md."""
    parts = [HEAD]
    for route in ROUTES:
        parts.append(f"\n## {route.path}\n\n{route.text}\n\n| field | | |\n|---|---|---|\n")
        parts += [_line(row) for row in rows(route.body) if route.deep or row.model is route.body]
    parts.append("\n## Others\n\n| route | |\n|---|---|\n")
    parts += [f"| {path} | {text} |\n" for path, text in OTHERS]
    return "".join(parts)


def _line(row: Row) -> str:
    name = f"`{row.path}`" + (" (required)" if row.required else "")
    return f"| {name} | {row.status} | {row.text.replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
