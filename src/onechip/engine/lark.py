"""A request's grammar as the one language llguidance compiles: its dialect of Lark, with JSON schemas inline.

Every spelling of a text is allowed: where the grammar leaves one text, the model still chooses among the tokens that
spell it (llguidance would otherwise force one segmentation).
"""

import json
import re

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from onechip.engine.json_schema import checked_schema
from onechip.errors import InvalidRequest
from onechip.request import Grammar

NO_FORCING = '%llguidance {"no_forcing": true}\n'
BLANKS = (
    r"[\x20\x0A\x0D\x09]{1,8}"  # between JSON tokens: bounded, or a model may write blanks for ever
)
# No \u: llguidance would take a key spelled with it for another than the declared one, whose schema it would escape.
ESCAPES = r"nrbtf\""


def lark_of(grammar: Grammar) -> str:
    """The Lark text. Raises InvalidRequest for what can be seen to be wrong before it is compiled."""
    if grammar.kind == "calls":
        return f"{NO_FORCING}start: calls\n{grammar.calls}"
    if grammar.kind == "lark":
        return NO_FORCING + _translated(grammar)
    start = "start: body | calls" if grammar.calls else "start: body"
    return f"{NO_FORCING}{start}\nbody: {_body(grammar)}\n{grammar.calls}"


def json_in_lark(schema: object, whitespace: str | None) -> str:
    """`%json {...}`; `whitespace` a regular expression, "" for none at all, None for a few blanks (BLANKS)."""
    pattern = BLANKS if whitespace is None else whitespace
    options: dict[str, object]
    options = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    options["json_allowed_escapes"] = ESCAPES
    inside = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return "%json " + json.dumps({**inside, "x-guidance": options}, ensure_ascii=False)


def regex_in_lark(regex: str) -> str:
    """A regular expression between Lark's slashes, which hold neither a bare slash nor the end of a line."""
    escaped = re.sub(
        r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.S
    )
    return "/" + escaped.replace("\n", "\\n").replace("\r", "\\r") + "/"


def _body(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return json_in_lark(checked_schema(grammar.text, grammar.param), grammar.whitespace)
    if grammar.kind == "choice":
        return " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.text))
    text = grammar.text.removeprefix("^")  # the whole text must match anyway
    if text.endswith("$") and not text.endswith(r"\$"):
        text = text[:-1]
    return regex_in_lark(text)


def _translated(grammar: Grammar) -> str:
    """Lark as it is, GBNF in Lark."""
    try:
        return any_to_lark(grammar.text)
    except (GbnfToLarkError, RecursionError) as error:
        raise InvalidRequest(
            f"{grammar.param} is neither Lark nor GBNF: {error}", param=grammar.param
        ) from error
