"""Layers unrolled, or run in loops over their repeats? What either costs a chip's compiler, without the chip.

    python benchmarks/scan_layers.py [--config DIR] [--target tpu-v5e-1] [--steps 8x8 512x8] [--out FILE]

Compiles the layers of a step (no logits, no sampler) as `--scan-layers off` and `on` run them (`onechip.model.stack`)
and prints seconds, CPU seconds, temporaries, code, launches, and the bytes of weights that a step takes out of their
stack into device memory before it reads them again: none on a TPU, which is why loops are the default there alone.
"""

import argparse
import json
import math
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax

from onechip.config import EngineConfig
from onechip.engine import hlo
from onechip.engine.buckets import Bucket
from onechip.engine.design import Hardware, design
from onechip.engine.programs import Shapes, abstract_arguments
from onechip.engine.step import hidden_states
from onechip.engine.target import Target, describe
from onechip.model.spec import model_config

CONFIG = Path(__file__).parents[1] / "tests" / "data" / "configs" / "gemma-4-E2B"
LARGE = 1 << 18  # bytes: no activation of a turn is as large and has a leading 1
# A layer's matrix on its own. `S(1)` in a TPU's layouts is VMEM: a weight that is fetched there is fetched once.
SLICE = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = bf16\[(1,\d+,\d+)\]\{([^}]*)\} (?:fusion|fusion-done|dynamic-slice|copy)\("
)


def copied(text: str) -> int:
    """Bytes of weights that instructions outside fusions cut from a stack, one turn of each loop."""
    total, fused = 0, False
    for line in text.splitlines():
        if line.endswith("{"):
            fused = "fused" in line
        found = SLICE.match(line)
        if found is not None and not fused and "S(1)" not in found[2]:
            size = 2 * math.prod(int(n) for n in found[1].split(","))
            total += size if size >= LARGE else 0
    return total


def measured(shapes: Shapes, bucket: Bucket, target: Target) -> dict[str, Any]:
    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target.sharding)

    function = partial(hidden_states, **shapes.statics(bucket), every_position=False)
    arguments = jax.tree.map(placed, abstract_arguments(shapes, bucket))
    with target.lowering():
        lowered = jax.jit(function, donate_argnums=1).lower(*arguments)
    wall, cpu = time.monotonic(), sum(os.times()[:2])
    compiled = lowered.compile(compiler_options=dict(target.options or {}))
    wall, cpu = time.monotonic() - wall, sum(os.times()[:2]) - cpu
    memory, text = compiled.memory_analysis(), compiled.as_text()
    found = {
        "step": f"{bucket.tokens}x{bucket.rows}", "scan_layers": shapes.config.scan_layers,
        "compile_s": wall, "cpu_s": cpu, "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes, "launches": hlo.launches(text),
        "copied_bytes": copied(text),
    }  # fmt: skip
    print(
        f"{found['step']:>7} {'loops' if shapes.config.scan_layers else 'unrolled':9}{wall:6.1f} s {cpu:6.1f} CPU s  "
        f"temporaries {found['temporary_bytes'] / 1e6:6.1f} MB  code {found['code_bytes'] / 1e6:5.1f} MB  "
        f"launches {found['launches']:5}  weights copied a turn {found['copied_bytes'] / 1e6:6.1f} MB",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--target", default="tpu-v5e-1")
    parser.add_argument("--steps", nargs="+", default=["8x8", "512x8"], metavar="TOKENSxROWS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = model_config(json.loads((args.config / "config.json").read_text()))
    target = describe(args.target)
    if target.chip is None:
        parser.error(
            f"--target is {args.target}, which has no compiler of its own; give a TPU or GPU"
        )
    hardware = Hardware(target.platform, target.chip.memory, 9.0)
    results: list[dict[str, Any]] = []
    for step in args.steps:
        for scan in ("off", "on"):
            engine = EngineConfig(max_seqs=64, max_model_len=16384, scan_layers=scan)
            shapes = design(config, engine, hardware).shapes
            tokens, rows = map(int, step.split("x"))
            results.append(measured(shapes, Bucket(tokens, rows), target))
    if args.out is not None:
        told = {"config": args.config.name, "target": args.target, "results": results}
        args.out.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
