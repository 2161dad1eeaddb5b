"""The few operations a layer is made of, in the arithmetic the model calls for. Everything here is float32 in and out.

Two arithmetics, chosen once a trace by `ops_for`: XLA's own, and for tiny float32 models on a CPU the reference's,
rounding for rounding (`kernels.float32` says why). Knows neither layers nor pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from onechip.config import ModelConfig
from onechip.kernels import float32
from onechip.kernels.rows import precision

# The longest sum the reference's matmul adds in one chain: longer ones it splits in ways of its own, and nothing is
# gained by following it in the rest. Only models made for tests are this small.
_ONE_CHAIN = 192


@dataclass(frozen=True)
class Ops:
    """`eps` is the norms'; `exact` asks for the reference's roundings; `platform` is what the program is for."""

    eps: float
    exact: bool
    platform: str

    def norm(self, x: Array, weight: Array | None = None) -> Array:
        """RMSNorm over the last axis, times the weight (none: no scale)."""
        if self.exact:
            return float32.rms_norm(x, weight, self.eps)
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps)
        return x if weight is None else x * weight

    def linear(self, x: Array, weight: Array) -> Array:
        """[T, out] = x [T, D], rounded to the weight's dtype, times weight [out, D].

        Asking for a float32 result also keeps XLA's CPU compiler from widening whole bf16 weights before every matmul.
        """
        if self.exact:
            return float32.matmul(x, weight)
        return lax.dot_general(
            x.astype(weight.dtype), weight, (((1,), (1,)), ((), ())),
            precision=precision(weight.dtype), preferred_element_type=jnp.float32,
        )  # fmt: skip

    def gelu(self, x: Array) -> Array:
        """The tanh form."""
        return float32.gelu(x) if self.exact else jax.nn.gelu(x, approximate=True)

    def cos_sin(self, turn: Array) -> tuple[Array, Array]:
        return float32.cos_sin(turn) if self.exact else (jnp.cos(turn), jnp.sin(turn))

    def rounded(self, x: Array) -> Array:
        """x, not to be folded into a fused multiply-add where that matters."""
        return float32.rounded(x) if self.exact else x


def ops_for(config: ModelConfig, params: Mapping[str, Any], platform: str) -> Ops:
    """The arithmetic of a model with these parameters in a program for `platform` (not always this machine's)."""
    widest = max(
        max(layer.ffn_dim, config.heads * layer.head_dim, config.hidden_size)
        for layer in config.layers
    )
    small = widest <= _ONE_CHAIN and platform == "cpu"
    return Ops(config.norm_eps, small and params["embed"].dtype == jnp.float32, platform)
