"""The client must not be the limit: it follows a stub that is faster than any server it will measure.

The threshold is low because test machines are shared; `benchmarks/ladder_client.py` prints the figure of a quiet one.
"""

from benchmarks.ladder_client import measured


def test_the_client_follows_ten_thousand_tokens_a_second():
    rates = []
    for _ in range(3):
        rate, cost, _ = measured(11_000, seconds=1.0)
        rates.append((round(rate), cost.cpu_share))
        if rate > 10_000:
            break
    assert rates[-1][0] > 10_000, rates


def test_a_streamed_token_costs_the_client_less_than_forty_microseconds():
    costs = []
    for _ in range(3):
        _, cost, _ = measured(8_000, seconds=1.0)
        costs.append(1e6 * cost.cpu_share / cost.chunks_per_s)
    assert min(costs) < 40, costs
