"""Compile the attention op for one chip that is not here; prints one JSON list. Run by test_aot.py, as a process.

argv[1]: {"target": "v5e" | "v6e" | "h200", "layers": [[heads, K/V heads, head dim, window or null], ...]}.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from onechip.kernels.attention import KV, Ragged, attend, blocks_for, plan, write

PAGE, PAGES, CONTEXT, CHUNK = 64, 4096, 16384, 512
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
_MOVES = re.compile(r"= \w+\[([\d,]*)\]\S* (copy|convert|transpose|concatenate|copy-start)\(")


def topology(target: str) -> Any:
    if target == "h200":
        return topologies.get_topology_desc(
            platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
        )
    return topologies.get_topology_desc(
        platform="tpu", topology_name=f"{target}:1x1", chips_per_host_bounds=(1, 1, 1)
    )


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
    chips = topology(target)
    sharding = jax.sharding.SingleDeviceSharding(chips.devices[0])
    mesh = topologies.make_mesh(chips, (1,), ("x",))
    implementation = "pallas_triton" if target == "h200" else "pallas_tpu"
    found: list[dict[str, Any]] = []
    for layer in layers:
        for name, run, arguments in programs(layer, implementation):
            placed = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
            )
            start = time.perf_counter()
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                lowered = jax.jit(run, donate_argnums=(0, 1)).lower(*placed)
            compiled = lowered.compile()
            memory = compiled.memory_analysis()
            pool = math.prod(arguments[0].shape)
            assert memory.alias_size_in_bytes >= 4 * pool
            moves = [
                match[0]
                for match in _MOVES.finditer(compiled.as_text())
                if math.prod(int(n) for n in match[1].split(",") if n) >= pool
            ]
            seconds = round(time.perf_counter() - start, 1)
            temporary = memory.temp_size_in_bytes
            found.append({"name": name, "seconds": seconds, "moves": moves, "temporary": temporary})
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
