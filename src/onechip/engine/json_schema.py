"""What must be seen in a JSON schema before llguidance compiles it, so that no keyword is skipped and none loops.

llguidance itself refuses, by name, the standard keywords that it does not implement. This module refuses what it would
compile into something else than the schema says, and a schema that only an endless text could satisfy. Keywords that
the standard does not know are annotations, as the standard says.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeGuard
from urllib.parse import unquote

from onechip.errors import InvalidRequest

MAX_DEPTH = 64  # nesting of a schema's text

# Characters without an escape of two letters: llguidance drops them from what it matches (see `lark.ESCAPES`).
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_CONTROL_IN_PATTERN = re.compile(r"\\(?:[avc]|0|x[01]|x7f|u00[01]|u007f|[ux]\{)", re.IGNORECASE)

Schema = dict[str, Any]


def checked_schema(text: str, param: str) -> Schema | bool:
    """The schema, if it can be enforced as far as this module can tell. Raises InvalidRequest naming the keyword."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not a JSON schema: {error}", param=param) from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{param}: a JSON schema is an object, not {text:.40}", param=param)
    try:
        check_depth(schema)
        for part in subschemas(schema):
            _check_keywords(part)
        _check_end(schema)
    except _Refused as error:
        raise InvalidRequest(f"{param} cannot be enforced: {error}", param=param) from error
    return schema


class _Refused(ValueError):
    """Why a schema is refused; becomes an InvalidRequest with the request's field."""


def _check_keywords(schema: Schema) -> None:
    """Refuse what llguidance would compile into something else (its own refusals come later)."""
    _check_texts(schema)
    least = schema.get("minProperties", 0)
    required = schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > max(1, len(required)):
        # Nothing keeps two free keys apart, and a repeated one counts once.
        raise _Refused(
            f"minProperties {least} needs as many required properties, here are {len(required)}"
        )
    reference = schema.get("$ref")
    if "$id" in schema and isinstance(reference, str) and not reference.startswith("#"):
        raise _Refused("$id beside $ref: drafts disagree on what it means")


def _check_texts(schema: Schema) -> None:
    """Refuse texts that the grammar could not spell, and would leave out."""
    for key in ("const", "enum", "required", "properties", "pattern", "patternProperties"):
        value = schema.get(key)
        names = value if key.endswith("roperties") else None
        texts = list(names) if isinstance(names, dict) else list(_texts(value))
        regex = key.startswith("pattern")
        for text in texts:
            if _CONTROL.search(text) or (regex and _CONTROL_IN_PATTERN.search(text)):
                raise _Refused(f"{key} holds a control character, in {text!r:.60}")


def _texts(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            stack += one
        stack.extend(_children(one))


def check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise _Refused(f"it is nested deeper than {MAX_DEPTH} levels")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def is_schema(value: Any) -> TypeGuard[Schema]:
    return isinstance(value, dict)


def subschemas(value: Any) -> Iterator[Schema]:
    """Every object of the document that may be a schema: all of them."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
        stack.extend(_children(one))


def resolve(root: Schema | bool, reference: str) -> Any:
    """What a `$ref` into the document itself points at; None for any other, and for one that points nowhere."""
    if not (reference == "#" or reference.startswith("#/")):
        return None
    value: Any = root
    for part in unquote(reference).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _check_end(root: Schema | bool) -> None:
    """Raise unless some finite text satisfies the schema: the least fixpoint over what its references point at."""
    references = {s["$ref"] for s in subschemas(root) if isinstance(s.get("$ref"), str)}
    ending: set[str] = set()
    while True:
        more = {r for r in references - ending if _ends(resolve(root, r), ending)}
        if not more:
            break
        ending |= more
    if not _ends(root, ending):
        loops = sorted(references - ending)
        raise _Refused(f"$ref {', '.join(loops)} requires itself: no text would ever be complete")


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether a finite value satisfies `schema`, if the references in `ending` can be."""
    if not is_schema(schema):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in ending:
        return False
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and not any(_ends(one, ending) for one in options):
            return False
    if not all(_ends(one, ending) for one in schema.get("allOf") or ()):
        return False
    kinds = schema.get("type")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds or ("null",))
    return bool(kinds - {"object", "array"}) or (
        ("object" in kinds and _object_ends(schema, ending))
        or ("array" in kinds and _array_ends(schema, ending))
    )


def _object_ends(schema: Schema, ending: set[str]) -> bool:
    properties = schema.get("properties") or {}
    other = schema.get("additionalProperties", True)
    return all(_ends(properties.get(name, other), ending) for name in schema.get("required") or ())


def _array_ends(schema: Schema, ending: set[str]) -> bool:
    least = schema.get("minItems", 0)
    first = schema.get("prefixItems") or []
    rest = [schema.get("items", True)] if least > len(first) else []
    return all(_ends(one, ending) for one in [*first[: int(least)], *rest])
