"""A row's place in its grammar: every spelling is allowed, ends are the request's own, thoughts come before."""

import itertools
from collections.abc import Iterator

import pytest
from tests.grammar_walk import (
    CLOSER,
    CONTROL,
    EOS,
    OPENER,
    SIZE,
    VOCABULARY,
    allowed,
    compiler,
    start,
    tokens_of,
)

from onechip.engine.grammar import RowGrammar, words_of
from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.errors import InvalidRequest
from onechip.request import Grammar

OBJECT = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}'

ENDLESS = (
    '{"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},'
    ' "$ref": "#/$defs/n"}'
)

LINKS = [f'"n{i}": {{"allOf": [{{"$ref": "#/$defs/n{i + 1}"}}]}}' for i in range(900)]
CHAIN = f'{{"$defs": {{{", ".join(LINKS)}, "n900": {{"type": "null"}}}}, "$ref": "#/$defs/n0"}}'


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return compiler()


def segmentations(text: bytes) -> Iterator[list[int]]:
    """Every way in which the vocabulary spells the text."""
    if not text:
        yield []
    for token, piece in enumerate(VOCABULARY.pieces):
        if piece and token not in CONTROL and text.startswith(piece):
            for rest in segmentations(text[len(piece) :]):
                yield [token, *rest]


def follow(grammars: GrammarCompiler, row: RowGrammar, tokens: list[int]) -> bool:
    """Whether each token was allowed in its turn."""
    for token in tokens:
        if token not in allowed(grammars, row):
            return False
        row.advance(token)
    return True


def test_every_segmentation_of_a_legal_text_is_allowed_and_ends_there(
    grammars: GrammarCompiler,
) -> None:
    found = list(segmentations(b'{"a": "x10"}'))
    assert len(found) > 10
    for tokens in found:
        row = start(grammars, Grammar("json_schema", OBJECT))
        assert follow(grammars, row, tokens), tokens
        assert allowed(grammars, row) == set(EOS)


@pytest.mark.parametrize(
    "text", ['{"a"}', '{"b', '{"a": 1', '{"a": "x", "a"', '{"a": "x"}\n', "[", '"']
)
def test_no_segmentation_of_an_illegal_text_is_allowed(
    grammars: GrammarCompiler, text: str
) -> None:
    for tokens in itertools.islice(segmentations(text.encode()), 50):
        row = start(grammars, Grammar("json_schema", OBJECT))
        assert not follow(grammars, row, tokens)


def test_a_token_that_reaches_beyond_the_structure_is_not_allowed(
    grammars: GrammarCompiler,
) -> None:
    row = start(grammars, Grammar("json_schema", OBJECT))
    assert follow(grammars, row, tokens_of('{"a": "x'))
    beyond = VOCABULARY.pieces.index(b'"}\n')
    assert beyond not in allowed(grammars, row)
    assert VOCABULARY.pieces.index(b'"}') in allowed(grammars, row)


def test_rolling_the_matcher_back_restores_the_masks(grammars: GrammarCompiler) -> None:
    tokens = tokens_of('{"a": "xé"}')
    row = start(grammars, Grammar("json_schema", OBJECT))
    masks = []
    for token in tokens:
        masks.append(allowed(grammars, row))
        row.advance(token)
    for count in range(1, len(tokens) + 1):
        assert row.matcher.rollback(count)
        assert allowed(grammars, row) == masks[-count]
        assert follow(grammars, row, tokens[-count:])


def test_blanks_between_json_tokens_are_few_or_what_was_asked(grammars: GrammarCompiler) -> None:
    loose = start(grammars, Grammar("json_schema", OBJECT))
    assert follow(grammars, loose, tokens_of("{" + " " * 8 + '"a"'))
    assert not follow(
        grammars, start(grammars, Grammar("json_schema", OBJECT)), tokens_of("{" + " " * 9)
    )
    tight = start(grammars, Grammar("json_schema", OBJECT, whitespace=""))
    assert not follow(grammars, tight, tokens_of("{ "))
    own = start(grammars, Grammar("json_schema", OBJECT, whitespace="-"))
    assert follow(grammars, own, tokens_of('{-"a"'))


def test_a_declared_key_cannot_be_spelled_anew_with_escapes(grammars: GrammarCompiler) -> None:
    """Else `{"a": 1, "\\u0061": "x"}` would be read as an object whose "a" is text."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    row = start(grammars, Grammar("json_schema", schema))
    assert not follow(grammars, row, tokens_of('{"a":1,"\\u0061'))


def test_control_tokens_are_never_part_of_a_text(grammars: GrammarCompiler) -> None:
    row = start(grammars, Grammar("regex", "(?s:.*)"))
    assert allowed(grammars, row) & set(CONTROL) == set(EOS)


def test_the_end_is_the_requests_own_stop_ids(grammars: GrammarCompiler) -> None:
    row = start(grammars, Grammar("choice", '["a"]'), stop_token_ids=(300,))
    assert follow(grammars, row, tokens_of("a"))
    assert allowed(grammars, row) == {*EOS, 300}


def test_a_thought_is_free_but_for_control_tokens(grammars: GrammarCompiler) -> None:
    row = start(grammars, Grammar("choice", '["a"]', thought="open", closer=CLOSER, opener=OPENER))
    inside = allowed(grammars, row)
    assert inside & set(CONTROL) == {CLOSER} and len(inside) == SIZE - len(CONTROL) + 1
    assert follow(grammars, row, tokens_of("b") * 3 + [CLOSER])
    assert allowed(grammars, row) == set(tokens_of("a"))


def test_a_thought_may_be_opened_once_and_only_at_the_start(grammars: GrammarCompiler) -> None:
    grammar = Grammar("choice", '["ab"]', thought="may_open", closer=CLOSER, opener=OPENER)
    row = start(grammars, grammar)
    assert allowed(grammars, row) == {OPENER, *tokens_of("a")}
    assert follow(grammars, row, [OPENER, CLOSER])
    assert allowed(grammars, row) == set(tokens_of("a"))
    row = start(grammars, grammar)
    assert follow(grammars, row, tokens_of("a"))
    assert OPENER not in allowed(grammars, row)


def test_words_hold_the_bits_of_ids() -> None:
    words = words_of([0, 31, 32, 69, -1], 70)
    assert words.tolist() == [1 | 1 << 31, 1, 1 << 5]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (ENDLESS, "requires itself"),
        ('{"minProperties": 3}', "minProperties"),
        ('{"const": "a\\u0000b"}', "control character"),
        ("[" * 80 + "]" * 80, "object"),
        ('{"type": "object", "required": 5, "properties": []}', "."),
        ('{"allOf": 3}', "."),
        ('{"type": [{}, 1]}', "."),
        ('{"type": "array", "minItems": "x"}', "."),
        ('{"$ref": 5}', "."),
        ('{"enum": 7}', "."),
        (CHAIN, "too many"),
        ('{"allOf": ' * 70 + "{}" + "}" * 70, "deeper"),
    ],
)  # fmt: skip
def test_schemas_that_would_mislead_the_compiler_are_refused(
    grammars: GrammarCompiler, schema: str, word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word):
        start(grammars, Grammar("json_schema", schema))


def test_a_recursive_schema_that_can_end_is_accepted(grammars: GrammarCompiler) -> None:
    tree = (
        '{"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": false}'
    )
    row = start(grammars, Grammar("json_schema", tree))
    assert follow(grammars, row, tokens_of('{"next":{"next":{}}}'))
