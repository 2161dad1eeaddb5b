"""The attention kernels compiled by the chips' own compilers, on a machine that has none of the chips.

libtpu's compiler needs jax[tpu], XLA's CUDA compiler jax[cuda13] and ptxas; without them the tests skip and say so.
What a chip's compiler refuses (memory, layouts, alignment) fails here. Seconds go to the test's properties.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("aot_probe.py")
# heads, K/V heads, head dim, window: sliding and full layers of E2B, E4B, 26B-A4B and 31B.
LAYERS = {
    "E2B": [(8, 1, 256, 512), (8, 1, 512, None)],
    "E4B": [(8, 2, 256, 512), (8, 2, 512, None)],
    "26B-A4B": [(16, 8, 256, 1024), (16, 2, 512, None)],
    "31B": [(32, 16, 256, 1024), (32, 4, 512, None)],
}
TARGETS = {
    "tpu-v5e-1": "libtpu",
    "tpu-v6e-1": "libtpu",
    "cuda-h200": "jax_cuda13_plugin",
}

pytestmark = [pytest.mark.aot, pytest.mark.slow]


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_and_leave_the_pool_where_it_is(
    target: str, model: str, record_property: Callable[[str, object], None]
):
    """64 rows of 16K, 512-token chunks, and the write: nothing but the kernels' own results is as large as a pool."""
    needed = TARGETS[target]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: nothing here compiles for {target}")
    if target == "cuda-h200" and shutil.which("ptxas") is None:
        pytest.skip("ptxas is not on PATH: XLA cannot assemble for a GPU")
    asked = json.dumps({"target": target, "layers": LAYERS[model]})
    done = subprocess.run(
        [sys.executable, str(PROBE), asked],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for program in json.loads(done.stdout.splitlines()[-1]):
        record_property(program["name"], program["seconds"])
        assert program["moves"] == [], program["name"]
        assert program["seconds"] < 60
        assert program["temporary"] < 64 << 20
