"""One vector carries all of a step's fields, bit for bit."""

from collections.abc import Callable, Mapping
from functools import cache

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onechip.engine.batch import BatchLayout
from onechip.engine.buckets import Bucket

LAYOUTS = st.sampled_from(
    [
        BatchLayout(Bucket(4, 4), 3, 2),
        BatchLayout(Bucket(9, 2), 1, 1),
        BatchLayout(Bucket(7, 3, score=True), 4, 0),
    ]
)


@cache
def reader(layout: BatchLayout) -> Callable[[np.ndarray], Mapping[str, jax.Array]]:
    return jax.jit(layout.unpack)


@given(LAYOUTS, st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_the_device_reads_what_the_host_wrote(layout: BatchLayout, seed: int):
    rng = np.random.default_rng(seed)
    vector, fields = layout.pack()
    written = {}
    for name, view in fields.items():
        bits = rng.integers(-(2**31), 2**31, view.shape).astype(np.int32)
        if view.dtype == np.float32:
            bits &= 0x7F7FFFFF  # finite: NaNs need not keep their bits
        written[name] = bits.view(view.dtype) if bits.shape else np.int32(bits)
        view[...] = written[name]
    read = reader(layout)(vector)
    assert read.keys() == written.keys()
    for name, value in written.items():
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(read[name], value, err_msg=name)


@given(LAYOUTS)
def test_fields_fill_the_vector_without_overlap(layout: BatchLayout):
    vector, fields = layout.pack()
    assert vector.size == layout.size == sum(view.size for view in fields.values())
    for index, view in enumerate(fields.values(), 1):
        view.view(np.int32)[...] = index
    sizes = [view.size for view in fields.values()]
    np.testing.assert_array_equal(vector, np.repeat(np.arange(1, len(sizes) + 1), sizes))


def test_a_fresh_vector_is_all_padding():
    layout = BatchLayout(Bucket(6, 2), 3, 2)
    _, fields = layout.pack()
    assert (fields["row"] == 2).all(), "a token of no row"
    for name in ("q_len", "kv_len", "flags", "full_table", "sliding_table"):
        assert not fields[name].any()


def test_each_step_has_a_vector_of_its_own():
    """On a CPU the device may still be reading the last one."""
    layout = BatchLayout(Bucket(6, 2), 3, 2)
    assert not np.shares_memory(layout.pack()[0], layout.pack()[0])
