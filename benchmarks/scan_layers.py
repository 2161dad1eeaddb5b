"""Layers unrolled, or a scan over their repeating groups? What either costs a chip's compiler, without the chip.

    python benchmarks/scan_layers.py [--config DIR] [--target tpu-v5e-1] [--steps 8x8 512x8] [--out FILE]

Compiles the layers of a step twice: as `onechip.model.gemma` runs them, and as two scans (layers that own K/V, layers
that share it) over groups of the smallest period of the layer table, with weights stacked along the groups and one
pool a layer kind, a layer being a range of its pages. Prints seconds, CPU seconds, temporaries, code and launches.
The engine is unrolled: this script says why, and what would have to change for that to be wrong.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from onechip.config import EngineConfig, LayerKind, ModelConfig
from onechip.engine import hlo
from onechip.engine.buckets import Bucket
from onechip.engine.design import Hardware, design
from onechip.engine.programs import Shapes, abstract_arguments
from onechip.engine.step import hidden_states, pack
from onechip.engine.target import Target, describe
from onechip.kernels.attention import KV, Work, attend, write
from onechip.model import gemma
from onechip.model.ops import ops_for
from onechip.model.spec import model_config

CONFIG = Path(__file__).parents[1] / "tests" / "data" / "configs" / "gemma-4-E2B"


def period(config: ModelConfig) -> int:
    """Layers of the smallest group that repeats, in both halves of the stack."""
    kinds = [layer.kind for layer in config.layers]
    halves = (kinds[: config.first_shared], kinds[config.first_shared :])
    for size in range(1, len(kinds)):
        even = all(len(half) % size == 0 for half in halves)
        if even and all(kind == kinds[i % size] for i, kind in enumerate(kinds)):
            return size
    raise SystemExit("the layer table has no period: there is nothing to scan over")


def stacked(config: ModelConfig, layers: Any) -> tuple[list[Any], list[Any]]:
    """Abstract weights of each place in a group, [groups, ...], of the owning half and of the sharing half."""
    size, split = period(config), config.first_shared

    def stack(start: int, stop: int) -> list[Any]:
        groups = (stop - start) // size

        def one(x: Any) -> Any:
            return jax.ShapeDtypeStruct((groups, *x.shape), x.dtype)

        return [jax.tree.map(one, layers[start + place]) for place in range(size if groups else 0)]

    return stack(0, split), stack(split, len(config.layers))


def scanned(
    params: Any, weights: Any, pools: dict[LayerKind, KV], state: Any, vector: Any, shapes: Shapes, bucket: Bucket
) -> Any:  # fmt: skip
    """The hidden states, by two scans."""
    config, attention = shapes.config, shapes.attention
    packed, _ = pack(shapes.layout(bucket).unpack(vector), state, shapes.page_size)
    ops = ops_for(config, params, shapes.platform)
    size, split = period(config), config.first_shared
    caches = [pools[layer.kind] for layer in config.owners]
    work = gemma._work(config, packed, caches, attention, False)
    look = partial(attend, scale=config.query_scale, implementation=attention)
    kinds = [layer.kind for layer in config.layers]
    a_group = {kind: kinds[:size].count(kind) for kind in set(kinds)}

    def moved(one: Work, base: Any) -> Work:
        table = jnp.where(one.rows.table > 0, one.rows.table + base, 0)
        items = one.items
        if items is not None:
            items = replace(items, pages=jnp.where(items.pages > 0, items.pages + base, 0))
        return replace(one, rows=replace(one.rows, table=table), items=items)

    def owning(carry: Any, x: Any) -> Any:
        h, pools = carry
        group, weights, ple = x
        for place in range(size):
            layer = config.layers[place]
            kind, pool = layer.kind, packed.pools[layer.kind]
            slot = group * a_group[kind] + kinds[:place].count(kind)
            base = slot * shapes.pages[kind]
            q, k, v = gemma._project(ops, weights[place], config, layer, h, ropes[kind])
            page = jnp.where(pool.page > 0, pool.page + base, 0)
            kv = write(pools[kind], k, v, page, pool.slot, implementation=attention)
            pools = {**pools, kind: kv}
            mixed = look(q, kv, moved(work[kind], base))
            h = gemma._finish_layer(
                ops, weights[place], config, h, mixed, None if ple is None else ple[place]
            )
        return (h, pools), None

    def sharing(h: Any, x: Any) -> Any:
        weights, ple = x
        for place in range(size):
            layer = config.layers[split + place]
            q, _, _ = gemma._project(ops, weights[place], config, layer, h, ropes[layer.kind])
            source = [o.kind for o in config.owners].count(layer.kind) - 1
            mixed = look(
                q, pools[layer.kind], moved(work[layer.kind], source * shapes.pages[layer.kind])
            )
            h = gemma._finish_layer(
                ops, weights[place], config, h, mixed, None if ple is None else ple[place]
            )
        return h, None

    def grouped(ple: Any) -> Any:
        if ple is None:
            return None
        return ple.reshape(ple.shape[0], -1, size, ple.shape[2]).transpose(1, 2, 0, 3)

    h = gemma._embed(ops, params, config, packed.token)
    ropes = gemma._ropes(ops, config, packed.position)
    ple = gemma._per_layer_inputs(ops, params, config, packed.token, h, 0, split)
    groups = jnp.arange(split // size)
    (h, pools), _ = jax.lax.scan(owning, (h, pools), (groups, weights[0], grouped(ple)))
    token = packed.token
    if packed.token.shape != packed.last.shape:
        h, token = h[packed.last], token[packed.last]
        work = gemma._last_tokens(work, token.shape[0], shapes.page_size)
        ropes = gemma._ropes(ops, config, packed.position[packed.last])
    if split < len(config.layers):
        embedded = gemma._embed(ops, params, config, token)
        ple = gemma._per_layer_inputs(
            ops, params, config, token, embedded, split, len(config.layers)
        )
        h, _ = jax.lax.scan(sharing, h, (weights[1], grouped(ple)))
    return ops.norm(h, params["final_norm"]), pools


def measured(name: str, function: Any, arguments: Any, donated: int, target: Target) -> dict[str, Any]:  # fmt: skip
    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target.sharding)

    with target.lowering():
        lowered = jax.jit(function, donate_argnums=donated).lower(*jax.tree.map(placed, arguments))
    wall, cpu = time.monotonic(), sum(os.times()[:2])
    compiled = lowered.compile(compiler_options=dict(target.options or {}))
    wall, cpu = time.monotonic() - wall, sum(os.times()[:2]) - cpu
    memory, text = compiled.memory_analysis(), compiled.as_text()
    found = {
        "name": name, "compile_s": wall, "cpu_s": cpu,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes, "launches": hlo.launches(text),
    }  # fmt: skip
    print(
        f"{name:24} {wall:6.1f} s  {cpu:6.1f} CPU s  temporaries {found['temporary_bytes'] / 1e6:7.1f} MB  "
        f"code {found['code_bytes'] / 1e6:6.1f} MB  launches {found['launches']}",
        flush=True,
    )
    return found


def pools_of(shapes: Shapes) -> dict[LayerKind, KV]:
    """One abstract pool a layer kind: the layers' pages one after the other."""
    pools: dict[LayerKind, KV] = {}
    for layer in shapes.config.owners:
        count = sum(other.kind == layer.kind for other in shapes.config.owners)
        shape = (layer.kv_heads, count * shapes.pages[layer.kind], shapes.page_size, layer.head_dim)
        array = jax.ShapeDtypeStruct(shape, shapes.kv_dtype)
        pools[layer.kind] = KV(array, array, str(shapes.kv_dtype))
    return pools


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
    assert target.chip is not None, "a chip's compiler, not this CPU's"
    hardware = Hardware(target.platform, target.chip.memory, 9.0)
    engine = EngineConfig(max_seqs=64, max_model_len=16384)
    shapes = design(config, engine, hardware).shapes
    results: list[dict[str, Any]] = []
    for step in args.steps:
        bucket = Bucket(*map(int, step.split("x")))
        params, caches, state, vector = abstract_arguments(shapes, bucket)
        unrolled = partial(hidden_states, **shapes.statics(bucket), every_position=False)
        results.append(
            measured(f"{step} unrolled", unrolled, (params, caches, state, vector), 1, target)
        )
        rest = {name: x for name, x in params.items() if name != "layers"}
        weights = stacked(config, params["layers"])
        both = partial(scanned, shapes=shapes, bucket=bucket)
        results.append(
            measured(f"{step} scan", both, (rest, weights, pools_of(shapes), state, vector), 2, target)
        )  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps({"target": args.target, "results": results}, indent=1))


if __name__ == "__main__":
    main()
