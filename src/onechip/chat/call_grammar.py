"""Tool calls as a grammar in Gemma's own syntax, for tool_choice "required", a named tool, and schemas beside tools.

    calls  := call, or call+                 call := <call> "call:" NAME "{" pairs "}" <call_end>
    string := <quote> text <quote>           numbers, true, false and null bare; arrays and objects as in JSON

Written in llguidance's Lark, with control tokens by id. Members come in the alphabetical order in which templates show
them to the model; what a schema leaves open (additional members beside declared ones) is not generated, which is
stricter than asked and never wrong. A keyword that is not enforced here is refused by its name, none is skipped.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from onechip.errors import InvalidRequest

Schema = Mapping[str, Any]

MAX_DEPTH = 64
ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment $defs definitions "
    "nullable contentMediaType contentEncoding strict".split()
)
NUMERIC = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
KNOWN = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": NUMERIC,
    "number": NUMERIC,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
# RFC 3339 and the like, as far as a regular expression tells: days 29 to 31 are left out of `date`.
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_HEX = "[0-9a-f]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "email": r"[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,16})?@[a-z0-9]{1,32}(\.[a-z]{2,8}){1,3}",
}
BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class CallTokens:
    """Ids of the control tokens that calls are written with."""

    call: int
    call_end: int
    quote: int


def call_rules(tools: Mapping[str, Schema], tokens: CallTokens, *, many: bool) -> str:
    """Lark rules, with the rule `calls`, for one call, or one and more, of any of the tools (parameters by name).

    Raises InvalidRequest, about "tools", naming tool and keyword of what cannot be enforced.
    """
    rules = _Rules(tokens)
    names: list[str] = []
    for index, (name, parameters) in enumerate(tools.items()):
        try:
            inside = rules.arguments(parameters)
        except _Refused as error:
            raise InvalidRequest(
                f"the parameters of tool {name!r} cannot be enforced: {error}", param="tools"
            ) from error
        names.append(f"call_{index}")
        rules.lines.append(f"call_{index}: {_quoted(f'call:{name}')} {inside}")
    one = f"<[{tokens.call}]> ({' | '.join(names)}) <[{tokens.call_end}]>"
    return "\n".join([f"calls: call{'+' if many else ''}", f"call: {one}", *rules.lines, ""])


class _Refused(ValueError):
    """Why a schema is refused."""


@dataclass
class _Rules:
    """The rules written so far, one tool's references at a time."""

    tokens: CallTokens
    lines: list[str] = field(default_factory=list[str])
    _root: Schema = field(default_factory=dict[str, Any])
    _named: dict[str, str] = field(default_factory=dict[str, str])
    _any: bool = False

    def arguments(self, parameters: Schema) -> str:
        """The expression of a call's braces and what is in them."""
        self._root, self._named = parameters, {}
        schema = {"type": "object", "properties": {}, **parameters}
        if not schema["properties"] and "additionalProperties" not in schema:
            schema["additionalProperties"] = False  # a tool without parameters is called without
        return self._value(schema, 0)

    def _value(self, schema: Any, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise _Refused(f"it is nested deeper than {MAX_DEPTH} levels")
        if schema is True or schema is None or schema == {}:
            return self._anything()
        if not isinstance(schema, dict):
            raise _Refused(f"{schema!r:.40} allows nothing" if schema is False else "not a schema")
        one = cast(dict[str, Any], schema)
        found = self._alternatives(one, depth)
        if one.get("nullable") is True and '"null"' not in found:
            found.append('"null"')
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"

    def _alternatives(self, schema: dict[str, Any], depth: int) -> list[str]:
        said = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if "$ref" in said:
            _alone(said, "$ref")
            return [self._reference(said["$ref"], depth)]
        if "allOf" in said:
            return [self._value(_joined(said), depth + 1)]
        for key in ("anyOf", "oneOf"):
            if key in said:
                _alone(said, key)
                options = _list(said[key], key)
                if key == "oneOf":
                    _check_disjoint(options)
                return [self._value(option, depth + 1) for option in options]
        if "const" in said or "enum" in said:
            return self._literals(said)
        kinds = _kinds(said)
        if not kinds:
            _refuse_others(said, frozenset())
            return [self._anything()]
        _refuse_others(said, frozenset[str]().union(*(KNOWN[kind] for kind in kinds)))
        return [self._typed(kind, said, depth) for kind in kinds]

    def _reference(self, reference: Any, depth: int) -> str:
        if reference not in self._named:
            target = _pointer(self._root, reference)
            name = self._named[reference] = f"ref_{len(self.lines)}_{len(self._named)}"
            self.lines.append(f"{name}: {self._value(target, depth + 1)}")
        return self._named[reference]

    def _literals(self, said: dict[str, Any]) -> list[str]:
        values = [said["const"]] if "const" in said else _list(said["enum"], "enum")
        _refuse_others(said, frozenset({"enum", "const"}))
        kinds = _kinds({"type": said["type"]}) if "type" in said else ()
        fitting = [one for one in values if not kinds or _is_any(one, kinds)]
        if not fitting:
            raise _Refused("enum has no value of its type")
        return [self._literal(one) for one in fitting]

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            text = _quoted(value) if value else ""
            return f"<[{self.tokens.quote}]> {text} <[{self.tokens.quote}]>"
        if isinstance(value, list):
            return self._series("[", [self._literal(one) for one in cast(list[Any], value)], "]")
        if isinstance(value, dict):
            members = sorted(cast(dict[str, Any], value).items(), key=_place)
            pairs = [f"{self._key(name)} {self._literal(one)}" for name, one in members]
            return self._series("{", pairs, "}")
        return _quoted(json.dumps(value))

    @staticmethod
    def _series(opening: str, parts: Sequence[str], closing: str) -> str:
        inside = ' "," '.join(parts)
        return f'("{opening}" {inside} "{closing}")'

    def _key(self, name: str) -> str:
        if BARE_KEY.fullmatch(name):
            return _quoted(f"{name}:")
        return f'<[{self.tokens.quote}]> {_quoted(name)} <[{self.tokens.quote}]> ":"'

    def _typed(self, kind: str, said: dict[str, Any], depth: int) -> str:
        match kind:
            case "string":
                return f"<[{self.tokens.quote}]> {_text(said)} <[{self.tokens.quote}]>"
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                return self._array(said, depth)
            case "object":
                return self._object(said, depth)
            case _:
                limits = {key: said[key] for key in NUMERIC & said.keys()}
                options = {"whitespace_flexible": False}
                return "%json " + json.dumps({"type": kind, **limits, "x-guidance": options})

    def _array(self, said: dict[str, Any], depth: int) -> str:
        least, most = _size(said, "minItems", 0), _size(said, "maxItems", None)
        assert least is not None
        if most is not None and most < max(least, 1):
            if least:
                raise _Refused(f"minItems {least} is above maxItems {most}")
            return '("[" "]")'
        name = self._rule(self._value(said.get("items", True), depth + 1))
        more = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        some = f'{name} ("," {name}){{{more}}}'
        return f'("[" {some} "]")' if least else f'("[" ({some})? "]")'

    def _object(self, said: dict[str, Any], depth: int) -> str:
        properties = said.get("properties") or {}
        required = _list(said.get("required", []), "required")
        if not isinstance(properties, dict):
            raise _Refused("properties is not an object")
        declared = {
            **cast(dict[str, Any], properties),
            **{n: True for n in required if n not in properties},
        }
        if not declared:
            return self._map(said.get("additionalProperties", True), depth)
        rest = self._rule('"}"', hint="end")
        first = rest
        for name, schema in sorted(declared.items(), key=_place, reverse=True):
            pair = self._rule(f"{self._key(name)} {self._value(schema, depth + 1)}")
            with_it = self._rule(f"{pair} {rest}")  # no member came before
            after = self._rule(f'"," {pair} {rest}')
            if name in required:
                first, rest = with_it, after
            else:
                first, rest = self._rule(f"{with_it} | {first}"), self._rule(f"{after} | {rest}")
        return f'"{{" {first}'

    def _map(self, member: Any, depth: int) -> str:
        """An object of any members."""
        if member is False:
            return '("{" "}")'
        quote = self.tokens.quote
        key = rf"(/[A-Za-z_][A-Za-z0-9_]*/ | <[{quote}]> /[^\x00-\x1f]{{1,64}}/ <[{quote}]>)"
        pair = self._rule(f'{key} ":" {self._value(member, depth + 1)}')
        return f'("{{" ({pair} ("," {pair})*)? "}}")'

    def _anything(self) -> str:
        if not self._any:
            self._any = True
            quote = f"<[{self.tokens.quote}]>"
            kinds = [
                f"{quote} /(?s:.*)/ {quote}",
                *(self._typed(k, {}, 0) for k in ("number", "boolean", "null")),
            ]
            kinds += ['("[" (anything ("," anything)*)? "]")']
            kinds += ['("{" (any_pair ("," any_pair)*)? "}")']
            self.lines.append(f"anything: {' | '.join(kinds)}")
            self.lines.append('any_pair: /[A-Za-z_][A-Za-z0-9_]*/ ":" anything')
        return "anything"

    def _rule(self, body: str, hint: str = "part") -> str:
        name = f"{hint}_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _text(said: dict[str, Any]) -> str:
    """The terminal of a string's inside."""
    least, most = _size(said, "minLength", 0), _size(said, "maxLength", None)
    sized = (
        f"(?s:.{{{least},{'' if most is None else most}}})"
        if least or most is not None
        else "(?s:.*)"
    )
    kind, pattern = said.get("format"), said.get("pattern")
    if pattern is None and kind is None:
        return f"/{sized}/"
    if (pattern is not None and kind is not None) or sized != "(?s:.*)":
        raise _Refused("pattern, format and lengths cannot be combined: give one of them")
    if kind is not None and kind not in FORMATS:
        raise _Refused(f"format {kind!r}; known are {', '.join(FORMATS)}")
    return f"/{FORMATS[kind] if kind is not None else _searched(pattern)}/"


def _searched(pattern: Any) -> str:
    """A pattern, which is searched for, as one of the whole text."""
    if not isinstance(pattern, str):
        raise _Refused("pattern is not a string")
    body = pattern.removeprefix("^")
    head = "" if body != pattern else "(?s:.*)"
    tail = "(?s:.*)"
    if body.endswith("$") and not body.endswith(r"\$"):
        body, tail = body[:-1], ""
    if re.search(r"(?<!\\)(?:\\\\)*[$^]", re.sub(r"\[\^", "[", body)) or (
        "|" in body and (not head or not tail)
    ):
        raise _Refused(
            f"pattern {pattern!r:.60}: anchors are understood at both ends only, without |"
        )
    body = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], body, flags=re.S)
    return f"{head}({body}){tail}".replace("\n", r"\n")


def _kinds(said: dict[str, Any]) -> tuple[str, ...]:
    """Declared types in lower case; of a schema without, the one that its keywords are about."""
    declared = said.get("type")
    if declared is None:
        found = [kind for kind, words in KNOWN.items() if words & said.keys() and kind != "integer"]
        return tuple(found)
    names = cast(list[Any], declared) if isinstance(declared, list) else [declared]
    kinds = tuple(name.lower() if isinstance(name, str) else "" for name in names)
    for kind in kinds:
        if kind not in KNOWN:
            raise _Refused(f"type {declared!r:.40}")
    return kinds


def _is_any(value: Any, kinds: Iterable[str]) -> bool:
    tests = {
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
    }
    return any(tests[kind] for kind in kinds)


def _joined(said: dict[str, Any]) -> dict[str, Any]:
    """allOf of parts that say different things; anything else would need an intersection."""
    whole = {key: value for key, value in said.items() if key != "allOf"}
    for part in _list(said["allOf"], "allOf"):
        if not isinstance(part, dict) or whole.keys() & part.keys() - ANNOTATIONS:
            raise _Refused("allOf of schemas that say the same keyword")
        whole |= cast(dict[str, Any], part)
    return whole


def _check_disjoint(options: Sequence[Any]) -> None:
    """oneOf is anyOf where no value can be two of them: here, where all have types of their own."""
    seen: set[str] = set()
    for option in options:
        kinds = (
            set(_kinds(cast(dict[str, Any], option))) if isinstance(option, dict) else set[str]()
        )
        if not kinds or kinds & seen or ("integer" in kinds | seen and "number" in kinds | seen):
            raise _Refused("oneOf of schemas that may overlap; use anyOf")
        seen |= kinds


def _alone(said: dict[str, Any], key: str) -> None:
    others = sorted(said.keys() - {key})
    if others:
        raise _Refused(f"{key} beside {', '.join(others)}")


def _refuse_others(said: dict[str, Any], known: frozenset[str]) -> None:
    others = sorted(said.keys() - known - {"type"})
    others = [
        o
        for o in others
        if not (o == "uniqueItems" and said[o] is False) and not o.startswith("x-")
    ]
    if others:
        raise _Refused(f"keyword {', '.join(others)}")


def _size(said: dict[str, Any], key: str, default: int | None) -> int | None:
    value = said.get(key, default)
    if value is not None and (type(value) is not int or value < 0):
        raise _Refused(f"{key} {value!r:.40}")
    return value


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list) or (not value and key != "required"):
        raise _Refused(f"{key} is not a list with something in it")
    return cast(list[Any], value)


def _pointer(root: Schema, reference: Any) -> Any:
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise _Refused(f"$ref {reference!r:.60}: only references into the tool's own parameters")
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or step not in found:
            raise _Refused(f"$ref {reference!r:.60} points nowhere")
        found = cast(Any, found[step])
    return found


def _place(member: tuple[str, Any]) -> tuple[str, str]:
    return member[0].lower(), member[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
