"""What must be ready before a server is: a program for every step it may take, masked ones included."""

import pytest
from tests.tiny_model import VOCAB, tiny_config

from onechip.engine.batch import ROW_FIELDS
from onechip.engine.buckets import bucket_table
from onechip.engine.programs import Constrain, Shapes, abstract_arguments, name_of, needed
from onechip.engine.runner import row_flags
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
    assert {Constrain(bucket.rows) for bucket in table.buckets} <= set(programs)
    assert len({name_of(program) for program in programs}) == len(programs)


def test_masking_takes_what_the_step_leaves() -> None:
    state, logits, token, logprob, block, masks = abstract_arguments(SHAPES, Constrain(4))
    assert logits.shape == (4, VOCAB) and token.shape == (8, 4) and logprob.shape == (4,)
    assert block.shape == (ROW_FIELDS, 4) and masks.shape == (4, VOCAB // 32)
    assert state.last_token.shape == (17,)


def test_a_wish_for_structure_is_no_flag_of_the_first_sampling() -> None:
    assert row_flags(SamplingParams(temperature=0.0)) == 1
