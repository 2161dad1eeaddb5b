"""What must be seen in a JSON schema before llguidance compiles it, so that no keyword is skipped and none loops.

llguidance itself refuses, by name, the standard keywords that it does not implement. This module refuses what it would
compile into something else than the schema says, and a schema that only an endless text could satisfy. Keywords that
the standard does not know are annotations, as the standard says.
"""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from onechip.errors import InvalidRequest

MAX_DEPTH = 64  # nesting of a schema's text
MAX_VISITS = 200_000  # of schemas, in following references: 0.1 s

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
        _check_depth(schema)
        for part in subschemas(schema):
            _check_keywords(part)
        _Endings(schema).check()
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


def _check_depth(value: Any) -> None:
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


class _Endings:
    """Which references a finite value can satisfy: the least fixpoint, found by asking all until nothing is new."""

    def __init__(self, root: Schema | bool):
        self.root = root
        self.proven: set[str] = set()
        self._left = MAX_VISITS

    def check(self) -> None:
        """Raise _Refused unless some finite text satisfies the schema."""
        found = (part.get("$ref") for part in subschemas(self.root))
        open_ones = {reference for reference in found if isinstance(reference, str)}
        while more := {r for r in open_ones if self._ends(resolve(self.root, r))}:
            self.proven |= more
            open_ones -= more
        if not self._ends(self.root):
            loops = ", ".join(sorted(open_ones))
            raise _Refused(f"$ref {loops} requires itself: no text would ever be complete")

    def _ends(self, schema: Any) -> bool:
        """Whether a finite value satisfies `schema`, if the proven references can be."""
        self._left -= 1
        if self._left < 0:
            raise _Refused("its references are too many to follow")
        if not isinstance(schema, dict):
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self.proven:
            return False
        choices = [_list(schema, key) for key in ("anyOf", "oneOf")]
        if not all(any(map(self._ends, options)) for options in choices if options):
            return False
        if not all(map(self._ends, _list(schema, "allOf"))):
            return False
        declared = schema.get("type")
        kinds = [declared] if isinstance(declared, str) else _list(schema, "type") or ["null"]
        return (
            any(kind not in ("object", "array") for kind in kinds)
            or ("object" in kinds and self._object_ends(schema))
            or ("array" in kinds and self._array_ends(schema))
        )

    def _object_ends(self, schema: Schema) -> bool:
        properties = schema.get("properties")
        declared: Schema = properties if isinstance(properties, dict) else {}
        other = schema.get("additionalProperties", True)
        names = [name for name in _list(schema, "required") if isinstance(name, str)]
        return all(self._ends(declared.get(name, other)) for name in names)

    def _array_ends(self, schema: Schema) -> bool:
        least = schema.get("minItems")
        count = least if isinstance(least, int) else 0
        first = _list(schema, "prefixItems")
        rest = [schema.get("items", True)] if count > len(first) else []
        return all(map(self._ends, [*first[:count], *rest]))


def _list(schema: Schema, key: str) -> list[Any]:
    """The list under `key`; what is none is llguidance's to refuse."""
    value = schema.get(key)
    return value if isinstance(value, list) else []
