"""The definitions, on timelines made by hand."""

import pytest

from onechip.ladder import figures
from onechip.ladder.record import Repeat, Request
from onechip.ladder.stream import Answer, Failure, Usage


def answer(sent: float, ttft: float, finish: float, tokens: int, **more: object) -> Answer:
    step = (finish - ttft) / 4
    arrivals = tuple(sent + ttft + step * n for n in range(5))
    return Answer(
        sent=sent,
        first_text=sent + ttft,
        finish=sent + finish,
        arrivals=arrivals,
        usage=Usage(10, tokens),
        text="x",
        **more,  # pyright: ignore[reportArgumentType]
    )


def request(**fields: object) -> Request:
    return Request(**{"sent_s": 0.0, "ttft_s": 0.1, "finish_s": 1.1, "output_tokens": 11, **fields})  # pyright: ignore


def test_a_repeat_runs_from_the_first_send_to_the_last_finish():
    repeat = figures.repeat_of([answer(100.0, 0.1, 1.1, 11), answer(100.5, 0.1, 2.1, 21)])
    assert repeat.wall_s == pytest.approx(2.6)
    assert repeat.output_tokens == 32
    assert repeat.requests[1].sent_s == pytest.approx(0.5)
    assert dict(repeat.gaps_ms) == {250.0: 4, 500.0: 4}


def test_the_time_per_token_leaves_the_first_token_out():
    assert figures.tpot_s(request()) == pytest.approx(0.1)
    assert figures.decode_tok_per_s(request()) == pytest.approx(10)
    assert figures.e2e_tok_per_s(request()) == pytest.approx(10)


@pytest.mark.parametrize("gone", [{"ttft_s": None}, {"finish_s": None}, {"output_tokens": 1}])
def test_no_pace_is_made_up(gone: dict[str, object]):
    assert figures.tpot_s(request(**gone)) is None


def test_a_failed_request_counts_for_nothing_and_is_kept():
    bad = answer(100.0, 0.1, 9.0, 50, error=Failure("broken", "gone"))
    repeat = figures.repeat_of([answer(100.0, 0.1, 1.1, 11), bad])
    found = figures.load_figures([repeat])
    assert found["output_tok_per_s"] == pytest.approx(10)
    assert (found["requests_good"], found["requests_failed"]) == (1, 1)
    assert repeat.requests[1].error == Failure("broken", "gone")


def test_the_cells_figure_is_the_median_of_repeats_with_their_spread():
    repeats = [Repeat(wall_s=1.0, output_tokens=n, requests=(request(),)) for n in (90, 120, 100)]
    found = figures.load_figures(repeats, price_per_hour=3.6)
    assert found["output_tok_per_s"] == 100
    assert found["spread"] == pytest.approx(30 / 90)
    assert found["cost_per_m_output_tokens"] == pytest.approx(10.0)


def test_goodput_counts_requests_within_every_target():
    slow, fast = request(ttft_s=0.3), request(ttft_s=0.05)
    repeat = Repeat(wall_s=2.0, output_tokens=22, requests=(slow, fast))
    assert figures.load_figures([repeat], {"ttft": 200})["goodput_req_per_s"] == 0.5
    assert figures.load_figures([repeat], {"ttft": 200, "tpot": 1})["goodput_req_per_s"] == 0
    assert figures.load_figures([repeat], {"ttft": 300.1})["goodput_req_per_s"] == 1


def test_the_score_of_one_is_the_geometric_mean_of_the_prompts_medians():
    def one(prompt: str, seconds: float, text: str = "a") -> Request:
        return request(prompt=prompt, finish_s=seconds, output_tokens=100, text_sha256=text)

    repeats = [
        Repeat(wall_s=3, output_tokens=200, requests=(one("p", s), one("q", 4 * s, t)))
        for s, t in ((1.0, "a"), (2.0, "a"), (9.0, "b"))
    ]
    found = figures.one_figures(repeats)
    assert found["e2e_tok_per_s"] == pytest.approx((50 * 12.5) ** 0.5)
    assert (found["prompts"], found["repeats_identical"]) == (2, 1)
