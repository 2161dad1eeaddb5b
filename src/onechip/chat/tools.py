"""Tools as clients declare them, checked, and made into what chat templates can print.

Published templates print a schema's `type` as it stands, know no unions and no references, and leave braces open where
a type is missing. So every schema becomes one plain type, all the way down, before a template sees it:

- `$ref` is resolved within the schema (a cycle ends in a bare object), `allOf` is merged, of `anyOf`, `oneOf` and a
  list of types the first that is not null counts; null among them means `nullable`.
- No type: that of enum or const, else object where there are properties, array where there are items, else string.
- A function's missing description is "", a null one of a property is none; `const` is an enum of one, null in an enum
  is left to `nullable`; an object always has properties.

What typed arguments and grammars are made from is the schema as declared, never this form. It knows no template.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from onechip.chat.messages import NULL, written
from onechip.chat.schemas import Schema, pointer, type_name
from onechip.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:-]{0,126}[A-Za-z0-9_-])?")
MAX_DEPTH = 32  # of a schema as printed: deeper parts are bare objects
# Names of schema fields, which published templates leave out where they name a property.
FIELDS = frozenset({"description", "type", "properties", "required", "nullable"})


def declared(tools: Sequence[Mapping[str, Any]], param: str = "tools") -> list[dict[str, Any]]:
    """The tools in OpenAI's shape, checked. Raises InvalidRequest naming `tools[i]`."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"{param}[{index}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise InvalidRequest(f'{where} must be of type "function" and have one', param=where)
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidRequest(
                f"{where}.function.name is {name!r}; allowed: up to 128 letters, digits, _ - . and :",
                param=f"{where}.function.name",
            )
        if name in names:
            raise InvalidRequest(f"{where}: the name {name!r} is declared twice", param=where)
        names.add(name)
        _check(function.get("parameters"), f"{where}.function.parameters")
    return [dict(tool) for tool in tools]


def _check(parameters: Any, where: str) -> None:
    """Only what a template or a reader of calls could stumble over; the rest of a schema may say what it likes."""
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{where} must be a JSON schema, an object", param=where)
    kind = cast(Schema, parameters).get("type", "object")
    if kind not in ("object", ["object"]):
        raise InvalidRequest(f"{where}.type is {kind!r}; it must be object", param=f"{where}.type")
    for key, wanted, named in (("properties", Mapping, "an object"), ("required", list, "a list")):
        if key in parameters and not isinstance(parameters[key], wanted):
            raise InvalidRequest(f"{where}.{key} must be {named}", param=f"{where}.{key}")


def printable(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool in a form that every template prints."""
    function = {key: value for key, value in tool["function"].items() if value is not None}
    function["description"] = _text(function.get("description"))
    parameters = function.pop("parameters", None)
    if parameters:
        function["parameters"] = Printer(parameters).schema(parameters)
    return {"type": "function", "function": function}


class Printer:
    """Schemas of one root, each as one plain type."""

    def __init__(self, root: Schema):
        self._root = root

    def schema(self, given: Any, depth: int = 0) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            return {"type": "object", "properties": {}}
        flat = self._flat(given, frozenset())
        kind, nullable = _kind(flat)
        made = {key: written(value) for key, value in flat.items() if value is not None}
        made["type"] = kind
        if nullable:
            made["nullable"] = True
        if "const" in made:
            made["enum"] = [made.pop("const")]
        if "enum" in made:
            made["enum"] = [value for value in _list(made["enum"]) if value is not NULL]
        made.pop("items", None)
        made.pop("properties", None)
        if kind == "array":
            items = _first(flat.get("items")) or _first(flat.get("prefixItems"))
            made |= {"items": self.schema(items, depth + 1)} if items else {}
        if kind == "object":
            properties = _mapping(flat.get("properties")).items()
            made["properties"] = {k: self.schema(v, depth + 1) for k, v in properties}
        return made

    def _flat(self, given: Any, seen: frozenset[str]) -> dict[str, Any]:
        """Without references and unions. `seen`: references on the way here."""
        schema = dict(_mapping(given))
        target = schema.pop("$ref", None)
        if isinstance(target, str):
            found = (
                {} if target in seen else self._flat(pointer(self._root, target), seen | {target})
            )
            schema = (found or {"type": "object"}) | schema
        for key in ("$defs", "definitions"):
            schema.pop(key, None)
        for part in _list(schema.pop("allOf", None)):
            schema = _joined(schema, self._flat(part, seen))
        for key in ("anyOf", "oneOf"):
            arms = [self._flat(arm, seen) for arm in _list(schema.pop(key, None))]
            real = [arm for arm in arms if arm.get("type") != "null"]
            if len(real) < len(arms):
                schema["nullable"] = True
            schema = (real[0] if real else {}) | schema
        return schema


def _kind(schema: Schema) -> tuple[str, bool]:
    """The one type, and whether null is allowed beside it."""
    declared_type = schema.get("type")
    kinds = declared_type if isinstance(declared_type, list) else [declared_type]
    names = [kind for kind in cast(list[Any], kinds) if isinstance(kind, str)]
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    names = names or [type_name(value) for value in values]
    real = [name for name in names if name != "null"]
    nullable = len(real) < len(names) or bool(schema.get("nullable"))
    if real:
        return real[0], nullable
    if schema.get("properties"):
        return "object", nullable
    return ("array" if schema.get("items") else "string"), nullable


def _joined(one: Schema, other: Schema) -> dict[str, Any]:
    """Both at once, as allOf means: properties and required are united, of anything else the first counts."""
    joined = {**other, **one}
    for key in ("properties",):
        if key in one and key in other:
            joined[key] = {**_mapping(other[key]), **_mapping(one[key])}
    if "required" in one and "required" in other:
        joined["required"] = [*_list(one["required"]), *_list(other["required"])]
    return joined


def shielded(tool: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A printable tool whose properties named like schema fields carry a mark, so that none is left out."""
    function = dict(tool["function"])
    if "parameters" in function:
        function["parameters"] = _shielded(function["parameters"], mark)
    return {**tool, "function": function}


def _shielded(schema: Schema, mark: str) -> dict[str, Any]:
    made = dict(schema)
    if "properties" in made:
        made["properties"] = {
            key + mark if key in FIELDS else key: _shielded(item, mark)
            for key, item in made["properties"].items()
        }
    if "items" in made:
        made["items"] = _shielded(made["items"], mark)
    return made


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _mapping(value: Any) -> Schema:
    return cast(Schema, value) if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
