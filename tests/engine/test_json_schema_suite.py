"""Every schema of the public test suite is enforced or refused by name: random texts under its grammar validate.

The validator is an independent one (the `jsonschema` package); the model draws at random from the grammar's masks,
which is harder on a grammar than any model. tests/data/README.md says where the schemas are from.
"""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.grammar_walk import CLOSER, OPENER, compiler, start, text_of, walk

from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.errors import InvalidRequest
from onechip.request import Grammar, ThoughtState

DATA = Path(__file__).parent.parent / "data" / "json_schema" / "schemas.jsonl"
SCHEMAS = [json.loads(line) for line in DATA.read_text().splitlines()]
VALIDATORS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft7": jsonschema.Draft7Validator,
}
FILES = sorted({entry["file"] for entry in SCHEMAS})


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return compiler()


def enforced(
    grammars: GrammarCompiler, entry: dict[str, Any], thought: ThoughtState, walks: int
) -> bool:
    """Whether the schema is accepted; then that every text that ended validates. A refusal names the field."""
    schema = entry["schema"]
    text = json.dumps(schema)
    grammar = Grammar("json_schema", text, thought=thought, opener=OPENER, closer=CLOSER)
    validator = VALIDATORS[entry["draft"]]
    judge = validator(schema, format_checker=validator.FORMAT_CHECKER)
    for seed in range(walks):
        try:
            row = start(grammars, grammar)
        except InvalidRequest as refusal:
            return _named(refusal, seed)
        tokens, ended = walk(grammars, row, random.Random(seed))
        if CLOSER in tokens:
            tokens = tokens[tokens.index(CLOSER) + 1 :]
        if ended:
            judge.validate(json.loads(text_of(tokens)))
    return True


def _named(refusal: InvalidRequest, walks: int) -> bool:
    """False, for a refusal that comes first and says what it is about."""
    assert walks == 0 and refusal.param == "structured_outputs"
    assert "cannot be enforced: " in refusal.message or "allows no text" in refusal.message
    return False


@pytest.mark.parametrize("file", FILES)
def test_a_schema_is_enforced_or_refused_never_skipped(
    grammars: GrammarCompiler, file: str
) -> None:
    for entry in SCHEMAS:
        if entry["file"] == file:
            enforced(grammars, entry, "none", walks=3)


def test_the_same_after_a_thought(grammars: GrammarCompiler) -> None:
    for entry in SCHEMAS[::3]:
        enforced(grammars, entry, "open", walks=1)
        enforced(grammars, entry, "may_open", walks=1)


def test_half_of_the_suite_is_enforced(grammars: GrammarCompiler) -> None:
    """A check that refused everything would pass the others."""
    count = sum(enforced(grammars, entry, "none", walks=1) for entry in SCHEMAS)
    assert count >= 320, f"{count} of {len(SCHEMAS)}"


@pytest.mark.slow
def test_many_walks_through_every_schema(grammars: GrammarCompiler) -> None:
    for entry in SCHEMAS:
        for thought in ("none", "open", "may_open"):
            enforced(grammars, entry, thought, walks=40)
