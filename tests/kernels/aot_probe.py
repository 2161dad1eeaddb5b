"""Compile the attention op for one chip that is not here; prints one JSON list. Run by test_aot.py, as a process.

argv[1]: {"target": one of engine.target, "layers": [[heads, K/V heads, head dim, window or null], ...]}.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from onechip.engine.hlo import large_moves
from onechip.engine.target import describe
from onechip.kernels.attention import KV, Ragged, attend, blocks_for, plan, write

PAGE, PAGES, CONTEXT, CHUNK = 64, 4096, 16384, 512


def programs(layer: list[Any], implementation: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(name, function, arguments) of a decode step and of a chunk: write, then attend."""
    heads, kv_heads, head_dim, window = layer
    longest = CONTEXT if window is None else window - 1 + CHUNK + PAGE - 1
    pool = jax.ShapeDtypeStruct((kv_heads, PAGES, PAGE, head_dim), jnp.bfloat16)
    for tokens, rows in ((64, 64), (CHUNK, 4)):

        def run(k: Any, v: Any, q: Any, new: Any, where: Any, ragged: Ragged, tokens: int = tokens):
            kv = write(KV(k, v, "bfloat16"), new, new, *where, implementation=implementation)
            blocks = blocks_for(implementation, heads, kv, window)
            work = plan(ragged, tokens, PAGE, window, blocks=blocks)
            return kv.k, kv.v, attend(q, kv, work, scale=1.0, implementation=implementation)

        row, token = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (rows, tokens))
        table = jax.ShapeDtypeStruct((rows, -(-longest // PAGE)), jnp.int32)
        ragged = Ragged(row, row, row, table, row, jax.ShapeDtypeStruct((), jnp.int32))
        q = jax.ShapeDtypeStruct((tokens, heads, head_dim), jnp.float32)
        new = jax.ShapeDtypeStruct((tokens, kv_heads, head_dim), jnp.float32)
        name = f"{tokens} tokens, {heads}/{kv_heads} heads of {head_dim}, window {window}"
        yield name, run, (pool, pool, q, new, (token, token), ragged)


def main(target: str, layers: list[list[Any]]) -> None:
    chip = describe(target)
    implementation = "pallas_triton" if chip.platform == "gpu" else "pallas_tpu"
    found: list[dict[str, Any]] = []
    for layer in layers:
        for name, run, arguments in programs(layer, implementation):
            placed = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip.sharding), arguments
            )
            start = time.perf_counter()
            with chip.lowering():
                lowered = jax.jit(run, donate_argnums=(0, 1)).lower(*placed)
            compiled = lowered.compile(compiler_options=dict(chip.options or {}))
            memory = compiled.memory_analysis()
            pool = 2 * math.prod(arguments[0].shape)
            assert memory.alias_size_in_bytes >= 2 * pool
            moves = large_moves(compiled.as_text(), pool, (arguments[0].shape,))
            seconds = round(time.perf_counter() - start, 1)
            temporary = memory.temp_size_in_bytes
            found.append({"name": name, "seconds": seconds, "moves": moves, "temporary": temporary})
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
