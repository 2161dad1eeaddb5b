"""Gemma 3 and Gemma 4 as formulas: from packed tokens to the hidden states somebody wants.

    h = embed[token] * sqrt(D)                       the factor rounded to the weights' dtype
    a layer:  h += norm(o attend(rope(norm(q h')), rope(norm(k h')), norm(v h'))),     h' = norm(h)
              h += norm(down(gelu(gate h') * up h'))                                    h' = norm(h)  [+ experts]
              h += norm(out(gelu(gate h) * ple))     Gemma 4 with per-layer inputs; the gate reads h itself
              h *= layer_scalar                      Gemma 4
    logits = cap tanh(embed norm(h) / cap)

Layers that share K/V write none and read their source's pages. From `config.first_shared` on nothing is written, so
those layers run only for the rows whose logits are wanted ("early exit": 69% of a prompt's matmul work on E2B).
Layers that repeat may be run in loops over stacked weights (`model.stack`): the formula is the same.
Knows neither requests nor who owns a page: it is handed pages and rows (`kernels.attention`).
Source: the reference implementation (transformers 5.24); here everything between matmuls stays float32, and
only a matmul's inputs are rounded to the weights' dtype (`model.ops`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from onechip.config import LayerKind, LayerSpec, ModelConfig
from onechip.kernels.attention import (
    KV,
    Ragged,
    Work,
    attend,
    blocks_for,
    plan,
    write,
)
from onechip.model import stack
from onechip.model.moe import mixture
from onechip.model.ops import Ops, ops_for
from onechip.model.rope import angles, rotate

# {"embed": ..., "layers": ({"qkv_proj": ...}, ...)}, as `model.params` lists them.
Params = Mapping[str, Any]


@register_dataclass
@dataclass(frozen=True)
class PoolRows:
    """One pool's view of a step: its rows, and the (page, slot) [T] each packed token's K/V goes to."""

    rows: Ragged
    page: Array
    slot: Array


@register_dataclass
@dataclass(frozen=True)
class Packed:
    """The tokens of a step. token, position [T] int32; `last` [R] int32: the packed index of each row's last token.

    `pools` maps a layer kind to its pool's rows ("full", "sliding").
    """

    token: Array
    position: Array
    last: Array
    pools: dict[LayerKind, PoolRows]


def forward(
    params: Params,
    config: ModelConfig,
    packed: Packed,
    caches: Sequence[KV],
    *,
    every_position: bool = False,
    attention: str = "auto",
    experts: str = "loop",
    platform: str = "cpu",
) -> tuple[Array, tuple[KV, ...]]:
    """Run a step: (normed hidden states, caches with the step's K/V written).

    Hidden is [R, D], each row's last token, or [T, D] with `every_position`. `caches` holds one KV a store of
    `stack.stores`, in order, and is best donated: the returned arrays are the same memory.
    """
    split, count = config.first_shared, len(config.layers)
    caches = tuple(caches)
    ops = ops_for(config, params, platform)
    exact = ops.exact and caches[0].dtype == "float32" and attention in ("auto", "plain")
    work = _work(config, packed, caches, attention, exact)
    token, position = packed.token, packed.position
    h = _embed(ops, params, config, token)
    ple = _per_layer_inputs(ops, params, config, token, h, 0, split)
    ropes = _ropes(ops, config, position)
    layers = _Layers(ops, config, params, packed.pools, attention, experts)
    h, caches = layers.run(0, split, (h, caches), _Inputs(work, ropes, ple, 0))

    if not every_position and packed.token.shape != packed.last.shape:
        h, token, position = h[packed.last], token[packed.last], position[packed.last]
        work = _last_tokens(work, token.shape[0], caches[0].k.shape[2])
        ropes = _ropes(ops, config, position)
    if split < count:
        # The projection half of the per-layer inputs reads the embeddings, not h: embed again, it is one gather.
        embedded = _embed(ops, params, config, token)
        ple = _per_layer_inputs(ops, params, config, token, embedded, split, count)
        h, caches = layers.run(split, count, (h, caches), _Inputs(work, ropes, ple, split))
    return ops.norm(h, params["final_norm"]), caches


_Carry = tuple[Array, tuple[KV, ...]]  # hidden states [T, D], every store
# A layer's index, and how many layers' pages lie before its own.
_At = tuple[Array | int, Array | int]


@dataclass(frozen=True)
class _Inputs:
    """What layers read of their step beside h: attention's work and (cos, sin) by kind, and the per-layer inputs
    [T, L, I] of the layers from `first` on.
    """

    work: dict[LayerKind, Work]
    ropes: dict[LayerKind, tuple[Array, Array]]
    ple: Array | None
    first: int


@dataclass(frozen=True)
class _Layers:
    """The layers, run by run as `model.stack` lays them out."""

    ops: Ops
    config: ModelConfig
    params: Params
    pools: dict[LayerKind, PoolRows]
    attention: str
    experts: str

    def run(self, start: int, stop: int, carry: _Carry, inputs: _Inputs) -> _Carry:
        """Layers start to stop."""
        for run in stack.runs(self.config):
            if start <= run.start < stop:
                carry = self._run(run, carry, inputs)
        return carry

    def _run(self, run: stack.Run, carry: _Carry, inputs: _Inputs) -> _Carry:
        layers = self.config.layers

        def turn(
            carry: _Carry, places: list[tuple[Mapping[str, Array], _At]]
        ) -> tuple[_Carry, None]:
            for place, (p, at) in enumerate(places):
                carry = self._layer(p, layers[run.start + place], at, carry, inputs)
            return carry, None

        places: list[Any] = []
        for place in range(run.size):
            ats = [(i, stack.store_of(self.config, layers[i])[1]) for i in run.layers(place)]
            at = ats[0] if run.turns == 1 else tuple(jnp.array(ats, jnp.int32).T)
            places.append((self.params["layers"][run.entry + place], at))
        return turn(carry, places)[0] if run.turns == 1 else lax.scan(turn, carry, places)[0]

    def _layer(
        self,
        p: Mapping[str, Array],
        layer: LayerSpec,
        at: _At,
        carry: _Carry,
        inputs: _Inputs,
    ) -> _Carry:
        """One layer; in a loop `layer` is the first turn's, and `at` says which it is now."""
        (h, caches), config, rows = carry, self.config, self.pools[layer.kind]
        number, _ = stack.store_of(config, layer)
        index, before = at
        offset = before * caches[number].layer_pages
        with jax.named_scope(f"{'' if layer.owns_kv else 'shared_'}{layer.kind}_attention"):
            q, k, v = _project(self.ops, p, config, layer, h, inputs.ropes[layer.kind])
            if layer.owns_kv:
                kv = write(
                    caches[number], k, v, rows.page, rows.slot,
                    offset=offset, implementation=self.attention,
                )  # fmt: skip
                caches = (*caches[:number], kv, *caches[number + 1 :])
            mixed = attend(
                q, caches[number], inputs.work[layer.kind],
                scale=config.query_scale, offset=offset, implementation=self.attention,
            )  # fmt: skip
        ple = None if inputs.ple is None else inputs.ple[:, index - inputs.first]
        return self._finish(p, h, mixed, ple), caches

    @jax.named_scope("feed_forward")
    def _finish(self, p: Mapping[str, Array], h: Array, mixed: Array, ple: Array | None) -> Array:
        """Everything after attention: output projection, feed-forward, per-layer input, layer scalar."""
        ops, config = self.ops, self.config
        attended = ops.linear(mixed.reshape(h.shape[0], -1), p["o_proj"])
        h = h + ops.norm(attended, p["post_attn_norm"])
        dense = _feed_forward(ops, p, ops.norm(h, p["ffn_norm"]))
        if config.moe is not None:
            dense = ops.norm(dense, p["post_dense_norm"])
            experts = mixture(p, config, h, ops.norm(h, p["experts_norm"]), self.experts)
            dense = dense + ops.norm(experts, p["post_experts_norm"])
        h = h + ops.norm(dense, p["post_ffn_norm"])
        if ple is not None:
            gated = ops.gelu(ops.linear(h, p["ple_gate"])) * ple
            h = h + ops.norm(ops.linear(gated, p["ple_out"]), p["ple_post_norm"])
        if config.family != "gemma4":
            return h
        h = h * p["layer_scalar"]
        return ops.rounded(h)


def logits(params: Params, config: ModelConfig, hidden: Array, platform: str = "cpu") -> Array:
    """float32 [B, V] of normed hidden states [B, D]; the softcap is the last thing before any bias or mask."""
    head = params["embed"] if config.tie_embeddings else params["lm_head"]
    out = ops_for(config, params, platform).linear(hidden, head)
    if config.final_softcap is None:
        return out
    return config.final_softcap * jnp.tanh(out / config.final_softcap)


def _embed(ops: Ops, params: Params, config: ModelConfig, token: Array) -> Array:
    table = params["embed"]
    return _scaled(ops, table[token], math.sqrt(config.hidden_size))


def _scaled(ops: Ops, rows: Array, factor: float) -> Array:
    """Table rows times a factor that the reference holds in the table's dtype, in float32."""
    factor_held = jnp.asarray(factor, rows.dtype).astype(jnp.float32)
    return ops.rounded(rows.astype(jnp.float32) * factor_held)


def _work(
    config: ModelConfig, packed: Packed, caches: Sequence[KV], attention: str, exact: bool
) -> dict[LayerKind, Work]:
    """The attention work of each layer kind, listed once for all its layers."""
    tokens = packed.token.shape[0]
    work: dict[LayerKind, Work] = {}
    for store, kv in zip(stack.stores(config), caches, strict=True):
        layer = store.owners[0]
        if layer.kind not in work:
            blocks = blocks_for(attention, config.heads, kv, layer.window, exact=exact)
            rows, page_size = packed.pools[layer.kind].rows, kv.k.shape[2]
            work[layer.kind] = plan(
                rows, tokens, page_size, layer.window, exact=exact, blocks=blocks
            )
    return work


def _last_tokens(work: dict[LayerKind, Work], count: int, page_size: int) -> dict[LayerKind, Work]:
    """The same work for each row's last token alone."""
    return {
        kind: plan(
            w.rows.last_tokens(), count, page_size, w.window, exact=w.items is None, blocks=w.blocks
        )
        for kind, w in work.items()
    }


def _ropes(ops: Ops, config: ModelConfig, position: Array) -> dict[LayerKind, tuple[Array, Array]]:
    """(cos, sin) of each layer kind: within a kind, all layers share one rope and one head dim."""
    first = {layer.kind: layer for layer in reversed(config.layers)}
    tables = {
        kind: ops.cos_sin(angles(layer.rope, layer.head_dim, position))
        for kind, layer in first.items()
    }
    # XLA would fuse the sines into every layer's rotation and compute them anew there.
    return lax.optimization_barrier(tables)


def _per_layer_inputs(
    ops: Ops,
    params: Params,
    config: ModelConfig,
    token: Array,
    embedded: Array,
    start: int,
    stop: int,
) -> Array | None:
    """[T, stop - start, I] for layers start..stop: (norm(proj h0 / sqrt(D)) + ple_table[token] sqrt(I)) / sqrt(2)."""
    width = config.ple_dim
    if not width:
        return None
    shape = (token.shape[0], stop - start, width)
    columns = slice(start * width, stop * width)
    # Whole rows: XLA has no gather of some columns for a TPU, and makes a loop over the tokens of it.
    looked_up = lax.optimization_barrier(params["ple_table"][token])[:, columns]
    looked_up = _scaled(ops, looked_up, math.sqrt(width)).reshape(shape)
    projected = ops.linear(embedded, params["ple_proj"][columns]) * config.hidden_size**-0.5
    normed = ops.norm(projected.reshape(shape), params["ple_norm"])
    return (normed + looked_up) * 2.0**-0.5


def _project(
    ops: Ops,
    p: Mapping[str, Array],
    config: ModelConfig,
    layer: LayerSpec,
    h: Array,
    cos_sin: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """From h [T, D]: q [T, N, H] and, for owners, k and v [T, K, H], normed and rotated; else k and v are empty."""
    x = ops.norm(h, p["attn_norm"])
    n, k_heads = config.heads, layer.kv_heads if layer.owns_kv else 0
    heads = ops.linear(x, p["qkv_proj"]).reshape(x.shape[0], -1, layer.head_dim)
    q, k = heads[:, :n], heads[:, n : n + k_heads]
    # V is the raw projection: before k's norm and rotation
    v = k if layer.k_eq_v else heads[:, n + k_heads :]
    q = rotate(ops.norm(q, p["q_norm"]), cos_sin, ops.rounded)
    if not layer.owns_kv:
        return q, k, v
    k = rotate(ops.norm(k, p["k_norm"]), cos_sin, ops.rounded)
    return q, k, ops.norm(v) if config.family == "gemma4" else v


def _feed_forward(ops: Ops, p: Mapping[str, Array], x: Array) -> Array:
    gate, up = jnp.split(ops.linear(x, p["gate_up_proj"]), 2, axis=-1)
    return ops.linear(ops.gelu(gate) * up, p["down_proj"])
