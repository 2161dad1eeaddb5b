"""Parity figures, by the API and on whole logits: zero on itself, and right where the difference is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ladder.stub import stub

from onechip import cli
from onechip.ladder import parity
from onechip.ladder.client import Target
from onechip.ladder.http import run

PROMPTS = {"a": "one two", "b": "three four five"}


def between(ref: str, got: str) -> list[parity.Parity]:
    return run(parity.servers(Target(ref), Target(got), max_tokens=5, prompts=PROMPTS))


@pytest.mark.parametrize("shape", ["completions", "chat"])
def test_a_server_is_at_parity_with_itself_in_either_shape(shape: str):
    with stub(logprobs=shape) as url, stub(logprobs="completions") as other:
        found = between(url, other)
    assert [p.prompt for p in found] == ["a", "b"]
    for p in found:
        assert (p.argmax, p.overlap, p.max_diff, p.kl) == (True, 1.0, 0.0, 0.0)
        assert (p.prefix, p.greedy, p.unit, p.identical) == (5, 5, "tokens", True)


def test_known_differences_are_found():
    with stub() as url, stub(shift=-0.7, text=" other") as other:
        found = between(url, other)[0]
    assert not found.argmax and found.prefix == 0 and not found.identical
    assert found.max_diff == pytest.approx(0.7)
    assert found.mean_diff == pytest.approx(0.7 * 7 / 20)
    assert found.kl > 0


def test_a_server_without_log_probabilities_is_said_to_be_one():
    with stub(logprobs="none") as url, pytest.raises(parity.NoLogprobs, match="shows no log"):
        between(url, url)


def test_twenty_alternatives_or_what_the_server_allows():
    with (
        stub(refuse={"logprobs": "at most 5"}) as url,
        pytest.raises(parity.NoLogprobs, match="at most 5"),
    ):
        between(url, url)


def test_whole_logits():
    rng = np.random.default_rng(0)
    ref = rng.normal(size=1000)
    got = ref.copy()
    got[ref.argmax()] -= 0.25
    found = parity.of_logits("x", ref, got, (1, 2, 3, 4), (1, 2, 9))
    assert found.max_diff == pytest.approx(0.25) and found.mean_diff == pytest.approx(0.25 / 1000)
    assert (found.prefix, found.greedy) == (2, 4)
    p = np.exp(ref) / np.exp(ref).sum()
    q = np.exp(got) / np.exp(got).sum()
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-9)


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=30), st.floats(-9, 9))
def test_divergence_is_never_negative_and_ignores_a_constant(values: list[float], shift: float):
    ref = np.asarray(values)
    assert parity.kl(ref, ref + shift) == pytest.approx(0, abs=1e-9)
    assert parity.kl(ref, ref[::-1]) >= 0


def test_the_command_prints_a_table_and_fails_when_argmax_differs(
    capsys: pytest.CaptureFixture[str],
):
    with stub() as url, stub(shift=-0.7) as other:
        assert cli.run(["parity", url, url, "--max-tokens", "4"]) == 0
        assert "6/6 identical" in capsys.readouterr().out
        assert cli.run(["parity", url, other, "--max-tokens", "4"]) == 1
    assert "differs" in capsys.readouterr().out


def test_a_server_and_a_checkpoint_are_not_compared(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["parity", "http://a", "demo"]) == 2
    assert "two URLs or two checkpoints" in capsys.readouterr().err
