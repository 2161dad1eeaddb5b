"""Incremental detokenisation: deltas add up to the whole, however tokens are grouped, and no character is split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_tokenizer import byte_ids, tiny

from onechip.chat.detokenize import Detokenizer, token_text

TOKENIZER = tiny()
ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)
utf8 = st.lists(st.sampled_from(byte_ids("é日😊") + byte_ids("a ") + [400, 5]), max_size=40)


def joined(tokens: list[int], skip: bool) -> str:
    """The definition: the bytes of all visible pieces, read as UTF-8."""
    visible = [i for i in tokens if not (skip and TOKENIZER.is_special(i))]
    return b"".join(map(TOKENIZER.piece_bytes, visible)).decode(errors="replace")


def streamed(tokens: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, skip_special=skip)
    deltas: list[str] = []
    done = 0
    for size in [*sizes, len(tokens)]:
        deltas.append(detokenizer.push(tokens[done : done + size]))
        done += size
    return [*deltas, detokenizer.flush()]


@settings(max_examples=300)
@given(ids | utf8, st.lists(st.integers(0, 5)), st.booleans())
def test_deltas_add_up_to_the_whole(tokens: list[int], sizes: list[int], skip: bool):
    assert "".join(streamed(tokens, sizes, skip)) == joined(tokens, skip)
    assert TOKENIZER.decode(tokens, skip_special=skip) == joined(tokens, skip)


@given(st.text(max_size=30), st.lists(st.integers(0, 3)))
def test_text_survives_the_round_trip_in_any_grouping(text: str, sizes: list[int]):
    """Except a literal U+2581, which the vocabulary itself cannot tell from a space."""
    text = text.encode(errors="replace").decode()
    for tokens in (TOKENIZER.encode(text), byte_ids(text)):
        expected = text.replace("\u2581", " ") if tokens != byte_ids(text) else text
        deltas = streamed(tokens, sizes)
        assert "".join(deltas) in (expected, text)
        if "\ufffd" not in text:
            assert all("\ufffd" not in delta for delta in deltas)


@pytest.mark.parametrize(
    "text",
    [" a", "a  b", "\n\n  x", "\t\tx", " " * 31, "def f():\n    return 1\n", "日本 é 😊👩‍💻"],
)
def test_spaces_and_characters_are_kept(text: str):
    assert "".join(streamed(TOKENIZER.encode(text), [1] * 99)) == text


def test_a_character_appears_with_its_last_byte_and_a_broken_one_when_it_is_sure():
    assert streamed(byte_ids("é"), [1, 1]) == ["", "é", "", ""]
    broken = [*byte_ids("日")[:2], *byte_ids("a")]
    assert streamed(broken, [1, 1, 1]) == ["", "", "\ufffda", "", ""]
    assert streamed(byte_ids("日")[:2], [1, 1]) == ["", "", "", "\ufffd"]


def test_special_pieces_are_hidden_or_spelled():
    tokens = [*TOKENIZER.encode("a"), 5, *TOKENIZER.encode("b")]
    assert "".join(streamed(tokens, [])) == "ab"
    assert "".join(streamed(tokens, [], skip=False)) == "a<end_of_turn>b"


def test_one_token_as_text_is_its_bytes_when_it_is_no_character():
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert token_text(b"") == ""
