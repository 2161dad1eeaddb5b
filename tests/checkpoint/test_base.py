"""Arrays handed out are aligned; block-wise work equals whole work."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onechip.checkpoint.base import (
    ALIGNMENT,
    BLOCK_VALUES,
    READ_DTYPES,
    aligned_empty,
    fill_blocks,
)


@given(
    st.lists(st.integers(1, 9), max_size=4).map(tuple), st.sampled_from(list(READ_DTYPES.values()))
)
def test_every_array_is_aligned_and_contiguous(shape, dtype):
    array = aligned_empty(shape, dtype)
    assert array.ctypes.data % ALIGNMENT == 0
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.size == math.prod(shape)


@pytest.mark.parametrize("dtype", READ_DTYPES)
@pytest.mark.parametrize("width", [1, 32, 256])
@pytest.mark.parametrize(
    "values", [0, 256, BLOCK_VALUES - 256, BLOCK_VALUES, 3 * BLOCK_VALUES + 512]
)
def test_filling_in_blocks_equals_filling_at_once(dtype, width, values):
    source = np.arange(values, dtype=np.float32).reshape(-1, width) / 7
    out = aligned_empty((values,), READ_DTYPES[dtype])
    fill_blocks(out, len(source), lambda start, stop: source[start:stop])
    assert np.array_equal(out, source.reshape(-1).astype(READ_DTYPES[dtype]))


def test_an_error_in_one_block_is_not_lost():
    def decode(start, stop):
        if start:
            raise ZeroDivisionError
        return np.zeros((stop - start, 256), np.float32)

    with pytest.raises(ZeroDivisionError):
        fill_blocks(np.zeros(4 * BLOCK_VALUES, np.float32), 4 * BLOCK_VALUES // 256, decode)
