"""Stop strings: found wherever the text is cut, nothing that could be part of one is let through, nothing is lost."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onechip.chat.stops import StopMatcher

texts = st.text("ab", max_size=40)
stop_sets = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def whole(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule in the plainest words: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(marks)]


@given(texts, stop_sets, st.lists(st.integers(0, 100)), st.booleans())
def test_any_cutting_gives_the_same_text(
    text: str, stops: list[str], places: list[int], include: bool
):
    matcher = StopMatcher(stops, include=include)
    seen = ""
    for piece in cut(text, places):
        seen += matcher.push(piece)
        if matcher.matched is not None:
            break
    assert (seen + matcher.flush(), matcher.matched) == whole(text, stops, include)


@given(texts, stop_sets)
def test_exactly_the_longest_possible_beginning_of_a_stop_is_held(text: str, stops: list[str]):
    matcher = StopMatcher(stops)
    seen = ""
    for length, char in enumerate(text, start=1):
        seen += matcher.push(char)
        if matcher.matched is not None:
            return
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max(n for n in range(length + 1) if text[length - n : length] in beginnings)
        assert seen == text[: length - held]


@pytest.mark.parametrize("stop", ["a" * 1000 + "b", "ab" * 500 + "c"])
def test_time_is_linear_however_repetitive_the_text(stop: str):
    text = stop[:-1] * 200
    begin = time.monotonic()
    matcher = StopMatcher([stop, stop[1:]])
    seen = "".join(matcher.push(char) for char in text)
    assert seen + matcher.flush() == text
    assert time.monotonic() - begin < 5
