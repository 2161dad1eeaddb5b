"""Whatever a plan may hold, a compiled shape holds it, and no decode row meets a one-row matmul on a CPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onechip.engine.buckets import CPU_FINE_ROWS, Bucket, BucketTable, bucket_table
from onechip.engine.programs import Choose, needed, needed_first
from onechip.errors import ConfigError

PLATFORMS = st.sampled_from(["cpu", "gpu", "tpu"])
TABLES = st.builds(bucket_table, st.integers(1, 300), st.none() | st.integers(1, 2048), PLATFORMS)


@given(TABLES, st.data())
def test_every_plan_within_the_budget_has_a_bucket(table: BucketTable, data: st.DataObject):
    most_rows = max(bucket.rows for bucket in table.buckets)
    singles = data.draw(st.integers(0, most_rows))
    left = min(table.chunk, table.token_budget - singles)
    chunks = data.draw(st.integers(0, most_rows - singles))
    tokens = singles + (data.draw(st.integers(min(2 * chunks, left), left)) if chunks else 0)
    rows = singles + chunks
    if not rows:
        return
    bucket = table.pick(tokens, rows, chunks == 0, False)
    assert bucket.tokens >= tokens and bucket.rows >= rows and not bucket.score
    assert chunks == 0 or bucket.tokens > bucket.rows, "a square bucket has one token a row"


@given(TABLES, st.data())
def test_a_scored_chunk_has_a_bucket(table: BucketTable, data: st.DataObject):
    tokens = data.draw(st.integers(1, table.limits().score))
    assert table.pick(tokens, 1, tokens == 1, True).score


@given(TABLES, st.data())
def test_the_smallest_bucket_is_picked(table: BucketTable, data: st.DataObject):
    rows = data.draw(st.integers(1, max(bucket.rows for bucket in table.buckets)))
    picked = table.pick(rows, rows, True, False)
    fitting = [b for b in table.buckets if b.rows >= rows and b.tokens >= rows and not b.score]
    assert picked == min(fitting)


@given(TABLES)
def test_the_table_is_sorted_and_short(table: BucketTable):
    assert list(table.buckets) == sorted(set(table.buckets))


@given(st.integers(1, 64), st.sampled_from(["gpu", "tpu"]))
def test_up_to_64_sequences_an_accelerator_has_at_most_eight_programs(max_seqs: int, platform: str):
    assert len(needed(bucket_table(max_seqs, None, platform))) <= 8


@given(st.integers(1, 300), st.none() | st.integers(1, 2048), st.sampled_from(["gpu", "tpu"]))
def test_an_accelerators_rows_come_in_eights(max_seqs: int, chunk: int | None, platform: str):
    table = bucket_table(max_seqs, chunk, platform)
    assert all(b.rows % 8 == 0 or b.rows == max_seqs < 8 for b in table.buckets)
    assert max(b.rows for b in table.buckets) >= max_seqs


def test_a_lone_prompt_on_an_accelerator_shares_layers_for_eight_rows():
    assert bucket_table(64, None, "tpu").pick(512, 1, False, False) == Bucket(512, 8)


@given(st.integers(1, 64))
def test_up_to_64_sequences_a_cpu_has_at_most_eight_steps(max_seqs: int):
    assert len(bucket_table(max_seqs, None, "cpu").buckets) <= 8


@given(TABLES, st.data())
def test_while_programs_are_compiled_every_plan_within_the_limits_has_one(
    table: BucketTable, data: st.DataObject
):
    ready = set(table.first()) | data.draw(st.sets(st.sampled_from(table.buckets)))
    part = table.only(ready)
    limits = part.limits()
    rows = data.draw(st.integers(1, limits.rows))
    tokens = data.draw(st.integers(rows, max(rows, limits.budget)))
    assert part.pick(tokens, rows, tokens == rows, False) in ready
    if limits.score:
        assert part.pick(data.draw(st.integers(1, limits.score)), 1, False, True) in ready


@given(TABLES)
def test_what_is_needed_first_comes_first_and_includes_the_largest(table: BucketTable):
    order, first = needed(table), needed_first(table)
    assert set(first) <= set(order) and {"admit", *table.buckets} <= set(order)
    assert {Choose(p.rows) for p in first if isinstance(p, Bucket)} <= set(first)
    assert max(b.rows * b.tokens for b in table.buckets) in [
        p.rows * p.tokens for p in first if isinstance(p, Bucket)
    ]


@given(st.integers(1, 300), st.integers(1, 2048))
def test_a_cpu_never_runs_a_matmul_of_one_row(max_seqs: int, chunk: int):
    table = bucket_table(max_seqs, chunk, "cpu")
    assert min(min(b.rows, b.tokens) for b in table.buckets) >= 2


@given(st.integers(2, CPU_FINE_ROWS))
def test_a_cpus_decode_buckets_waste_less_than_half(max_seqs: int):
    table = bucket_table(max_seqs, None, "cpu")
    for rows in range(2, max_seqs + 1):
        assert table.pick(rows, rows, True, False).rows < 2 * rows


def test_a_lone_prompt_does_not_pay_for_the_logits_of_every_slot():
    assert bucket_table(64, 512, "cpu").pick(60, 1, False, False) == Bucket(64, 4)


def test_a_plan_that_fits_nothing_is_our_mistake():
    with pytest.raises(AssertionError, match="no bucket for 999 tokens in 1 rows"):
        bucket_table(4, 16, "cpu").pick(999, 1, False, False)


@pytest.mark.parametrize(
    ("max_seqs", "chunk", "name"), [(0, None, "max_seqs"), (4, 0, "chunk_size")]
)
def test_sizes_below_one_are_refused(max_seqs: int, chunk: int | None, name: str):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        bucket_table(max_seqs, chunk, "cpu")
