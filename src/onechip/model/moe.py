"""Mixture of experts (26B-A4B): who gets which token, and what comes back.

The router reads the raw residual (its own scale-less norm), softmaxes over all experts in float32, keeps the best k,
renormalises, and only then applies per_expert_scale. Tokens are sorted by expert and meet their weights in a grouped
matmul: nothing is dropped and no expert without tokens is read. Source: the reference implementation.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from onechip.config import ModelConfig
from onechip.kernels.grouped_matmul import grouped_matmul


def mixture(
    p: Mapping[str, Array], config: ModelConfig, residual: Array, x: Array, implementation: str
) -> Array:
    """Experts' weighted outputs, float32 [T, D], for normed inputs x [T, D], routed by the residual stream [T, D]."""
    moe = config.moe
    assert moe is not None
    grouped = partial(grouped_matmul, implementation=implementation)
    share, expert = _route(p, config, residual)
    flat = expert.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=moe.experts).astype(jnp.int32)
    sorted_x = x[order // moe.top_k].astype(p["experts_gate_up"].dtype)
    gate, up = jnp.split(grouped(sorted_x, p["experts_gate_up"], sizes), 2, axis=-1)
    hidden = jax.nn.gelu(gate, approximate=True) * up
    out = grouped(hidden.astype(sorted_x.dtype), p["experts_down"], sizes)
    unsorted = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    per_choice = unsorted.reshape(x.shape[0], moe.top_k, -1)
    return jnp.einsum("tkd,tk->td", per_choice, share, precision=lax.Precision.HIGHEST)


def _route(p: Mapping[str, Array], config: ModelConfig, residual: Array) -> tuple[Array, Array]:
    """(share float32 [T, k], expert int32 [T, k]) of each token's chosen experts."""
    assert config.moe is not None
    wide = residual.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + config.norm_eps)
    scaled = wide * p["router_scale"] * config.hidden_size**-0.5
    scores = lax.dot_general(
        scaled,
        p["router_proj"].astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    share, expert = lax.top_k(jax.nn.softmax(scores, axis=-1), config.moe.top_k)
    share = share / share.sum(-1, keepdims=True)
    return share * p["expert_scale"][expert], expert
