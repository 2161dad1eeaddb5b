"""What a tool's JSON schema says about one value: which types it may have, and where its parts' schemas are.

It owns the typing of bare values in calls. Order: what the text is as a JSON literal, then what the schema declares.
It validates nothing, and a schema it cannot follow (an unknown $ref, nonsense) means "anything".

- A literal stays as written: no number passes through a float or an int, so big integers and 5.0 survive exactly.
- Declared string, and nothing else that the literal is: the text as written, leading zeros kept. A bare `null` is null
  even then: a model that means the word delimits it.
- Anything with leading zeros is no JSON number, hence a string whatever is declared.
- Delimited text becomes a number only where it is exactly one and the schema allows that type and no string.
- `None`, `True` and `False`, which old templates print, are read as null, true and false.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from json import JSONEncoder
from typing import Any, cast

Schema = Mapping[str, Any]
Node = tuple[Schema, ...]  # the alternatives that may describe one value; empty: anything goes

MAX_ALTERNATIVES = 64  # of one value, also the bound on cycles of $ref
TELLING = frozenset({"type", "enum", "const", "properties", "items", "additionalProperties"})
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}


dumps = JSONEncoder(
    ensure_ascii=False
).encode  # an encoder made once: strings come a character at a time


def escaped(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return dumps(text)[1:-1]


def tool_schemas(tools: Iterable[Any] | None) -> dict[str, Schema]:
    """Parameter schemas by name, of tools in OpenAI's shape (or their functions alone)."""
    found: dict[str, Schema] = {}
    for tool in tools or ():
        function = _mapping(_mapping(tool).get("function", tool))
        name = function.get("name")
        if isinstance(name, str):
            found[name] = _mapping(function.get("parameters"))
    return found


class Types:
    """Schemas of one tool: the root, against which references are resolved, and steps down from it."""

    def __init__(self, root: Schema):
        self._root = root
        self.top: Node = self.node(root)

    def node(self, schema: Any) -> Node:
        """The alternatives of a schema: references followed, unions and intersections taken apart."""
        found: list[Schema] = []
        todo: list[Any] = [schema]
        for _ in range(MAX_ALTERNATIVES):
            if not todo:
                break
            one = self._resolve(_mapping(todo.pop()))
            parts = [p for key in ("anyOf", "oneOf", "allOf") for p in _items(one.get(key))]
            todo += parts
            if TELLING & one.keys():
                found.append(one)
            elif not parts and not todo and not found:
                return ()
        return tuple(found)

    def member(self, node: Node, key: str) -> Node:
        """The schema of an object's member."""
        return self._join(_member(schema, key) for schema in node)

    def items(self, node: Node) -> Node:
        """The schema of an array's items."""
        return self._join(schema.get("items") for schema in node)

    def _join(self, schemas: Iterable[Any]) -> Node:
        nodes = [self.node(schema) for schema in schemas if isinstance(schema, Mapping)]
        return tuple(schema for node in nodes for schema in node)[:MAX_ALTERNATIVES]

    def _resolve(self, schema: Schema) -> Schema:
        for _ in range(MAX_ALTERNATIVES):
            target = schema.get("$ref")
            if not isinstance(target, str):
                break
            schema = _mapping(pointer(self._root, target))
        return schema


def pointer(root: Schema, target: str) -> Any:
    """What a local reference (`#/$defs/A`) names; None for any other."""
    found: Any = root if target.startswith("#") else None
    for step in target.removeprefix("#").split("/")[1:]:
        found = _mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


def _member(schema: Schema, key: str) -> Any:
    properties = _mapping(schema.get("properties"))
    return properties[key] if key in properties else schema.get("additionalProperties")


def _mapping(value: Any) -> Schema:
    return cast(Schema, value) if isinstance(value, Mapping) else {}


def _items(value: Any) -> Sequence[Any]:
    return cast(Sequence[Any], value) if isinstance(value, list) else ()


def types_of(node: Node) -> frozenset[str]:
    """The declared types; empty: none declared."""
    return frozenset(name for schema in node for name in _declared(schema))


def _declared(schema: Schema) -> Iterable[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        return (declared,)
    if isinstance(declared, list):
        return [name for name in cast(list[Any], declared) if isinstance(name, str)]
    values = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return [type_name(value) for value in values]


def type_name(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number")):
        if isinstance(value, kind):
            return name
    return "array" if isinstance(value, list) else "object"


def bare(text: str, node: Node) -> str:
    """JSON of a value written without delimiters."""
    types = types_of(node)
    only_text = "string" in types
    text_word = PYTHON_WORDS.get(text, text)
    if text_word == "null":
        return "null"
    if text_word in ("true", "false"):
        return dumps(text) if only_text and "boolean" not in types else text_word
    if NUMBER.fullmatch(text):
        return dumps(text) if only_text and not types & {"integer", "number"} else text
    return dumps(text)


def wants_number(node: Node) -> bool:
    """Whether delimited text may turn out to be a number: then it must be complete before it is typed."""
    types = types_of(node)
    return bool(types & {"integer", "number"}) and "string" not in types


def delimited(text: str, node: Node) -> str:
    """JSON of complete delimited text (already escaped for JSON) where `wants_number` holds."""
    pattern = NUMBER if "number" in types_of(node) else INTEGER
    return text if pattern.fullmatch(text) else f'"{text}"'
