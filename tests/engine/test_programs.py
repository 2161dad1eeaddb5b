"""What must be ready before a server is: a program for every step it may take, masked ones included."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future

import jax
import pytest
from tests.tiny_model import VOCAB, tiny_config

from onechip.cache.pages import PageTable, PoolShape
from onechip.engine.batch import ROW_FIELDS
from onechip.engine.buckets import BucketTable, Limits, bucket_table
from onechip.engine.programs import (
    Choose,
    Program,
    Programs,
    Shapes,
    abstract_arguments,
    name_of,
    needed,
    needed_first,
)
from onechip.engine.runner import DeviceRunner, row_flags
from onechip.model.spec import model_config
from onechip.request import SamplingParams

SHAPES = Shapes(
    config=model_config(tiny_config()),
    dtype="float32",
    kv_dtype="float32",
    page_size=16,
    max_seqs=16,
    full_columns=8,
    sliding_columns=4,
    attention="auto",
    pages={"full": 9, "sliding": 9},
    steps=8,
)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_every_bucket_has_its_program_for_rows_under_a_grammar(platform: str) -> None:
    table = bucket_table(16, None, platform)
    programs = needed(table)
    assert {Choose(bucket.rows) for bucket in table.buckets} <= set(programs)
    assert len({name_of(program) for program in programs}) == len(programs)


def test_masking_takes_what_the_step_leaves() -> None:
    state, logits, token, scores, block, masks = abstract_arguments(SHAPES, Choose(4))
    assert logits.shape == (4, VOCAB) and token.shape == (8, 4) and scores[0].shape == (4,)
    assert block.shape == (ROW_FIELDS, 4) and masks.shape == (4, VOCAB // 8)
    assert state.last_token.shape == (17,)


def test_a_wish_for_structure_is_no_flag_of_the_first_sampling() -> None:
    assert row_flags(SamplingParams(temperature=0.0)) == 1


class Coming(Programs):
    """Programs whose compiles the test finishes, or fails, by hand."""

    def __init__(self) -> None:
        self.shapes = SHAPES
        self.ready = {}
        self._coming = {}

    def begin(self, wanted: Iterable[Program], progress: Callable[[str], None]) -> None:
        self._coming = {program: Future() for program in wanted}

    def finish(self, *programs: Program) -> None:
        for program in programs:
            self.ready[program] = None
            self._coming[program].set_result(None)


def coming() -> tuple[DeviceRunner, Coming, BucketTable]:
    table, programs = bucket_table(16, None, "tpu"), Coming()
    programs.begin(needed(table), lambda name: None)
    pages = PageTable(16, {"full": PoolShape(9, None), "sliding": PoolShape(9, 8)})
    device = jax.local_devices()[0]
    return DeviceRunner(SHAPES, table, {}, pages, device, programs), programs, table


def test_plans_stay_within_the_programs_that_are_there() -> None:
    runner, programs, table = coming()
    programs.finish(*needed_first(table))
    first = runner.limits()
    assert first is not None and first.budget >= 64 and runner.limits() is None
    left = [program for program in needed(table) if program not in programs.ready]
    assert left, "not everything is needed for the first answer"
    for program in left:
        programs.finish(program)
        runner.limits()
    assert runner.table == table
    assert table.limits() == Limits(16, table.chunk, table.token_budget, 128)
    assert runner.limits() is None


def test_a_bucket_waits_for_its_second_program() -> None:
    runner, programs, table = coming()
    programs.finish(*(p for p in needed_first(table) if not isinstance(p, Choose)))
    rows = {bucket.rows for bucket in table.buckets if bucket in programs.ready}
    programs.finish(Choose(min(rows)))
    with pytest.raises(ValueError):
        table.only([]).limits()
    runner.limits()
    assert {bucket.rows for bucket in runner.table.buckets} == {min(rows)}


def test_a_program_that_will_never_be_ready_is_raised_while_serving() -> None:
    runner, programs, table = coming()
    programs.finish(*needed_first(table))
    runner.limits()
    last = [program for program in needed(table) if program not in programs.ready][-1]
    programs._coming[last].set_exception(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.limits()
