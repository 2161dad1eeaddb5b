"""From logits to tokens, on the device, each row by its own parameters and by nothing else.

Order: (softcap, in the model) logit bias, penalties, bans, grammar, then temperature, top-k, top-p, min-p, one draw.
Everything beyond the plain argmax sits behind a conditional on what the step's rows ask for: a greedy batch pays for
none of it.

A draw is the inverse of the kept tokens' cumulative distribution at u = uniform(fold_in(key(seed), position)): a row's
draw depends on its seed, position and logits, never on its batch mates or its place. Most filters are settled by the
64 best tokens (`_CANDIDATES`); a row they do not settle (no top-k and a flat distribution) is drawn from the whole
vocabulary. Which of the two ways is taken depends on the row alone, so rounding cannot make neighbours matter.
On a TPU rows are sampled eight at a time (`in_tiles`): they fill a tile, and what is as wide as the vocabulary exists
for eight rows only. Knows arrays of one step only.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from onechip.engine import batch as flag
from onechip.engine.state import BANNED_BIT, PROMPT_BIT, SlotState
from onechip.kernels.bits import unpack_bits
from onechip.request import MAX_LOGPROBS

_CANDIDATES = 64  # Gemma's own default top_k
_BLOCK = (
    128  # vocabulary entries a block: the k best tokens lie in the k blocks with the best maxima
)
_NEVER = -jnp.inf
_TILE = 8  # rows of a TPU's float32 tile

Rows = Mapping[str, Array]  # per-row fields of `engine.batch`
T = TypeVar("T")


def in_tiles(function: Callable[..., T], platform: str, *rows: Any) -> T:
    """function(*rows) of trees of arrays [R, ...], on a TPU eight rows at a time: a program for 64 rows is no larger,
    nor longer to compile, than one for eight.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    if platform != "tpu" or count <= _TILE or count % _TILE:
        return function(*rows)

    def split(x: Array) -> Array:
        return x.reshape(-1, _TILE, *x.shape[1:])

    def joined(x: Array) -> Array:
        return x.reshape(count, *x.shape[2:])

    def one(tile: tuple[Any, ...]) -> T:
        return function(*tile)

    return jax.tree.map(joined, lax.map(one, jax.tree.map(split, rows)))


def sample(
    logits: Array, rows: Rows, state: SlotState, masks: Array | None = None, platform: str = "cpu"
) -> Array:
    """int32 [R]: each row's next token, or -1 where its logits are not finite. logits float32 [R, V].

    `masks` uint8 [R, 4 ceil(V / 32)]: what the rows flagged GRAMMAR may choose from, at least one token each.
    """
    adjusted: Array = lax.cond(
        _any(rows, flag.PENALTIES | flag.BIAS | flag.ALLOWED | flag.MIN_TOKENS),
        lambda: _adjust(logits, rows, state),
        lambda: logits,
    )
    if masks is not None:
        adjusted = lax.cond(
            _any(rows, flag.GRAMMAR),
            lambda: _permit(adjusted, rows, masks, platform),
            lambda: adjusted,
        )
    greedy = _argmax(adjusted)
    token = lax.cond(
        _any(rows, flag.DRAW), lambda: _draw_rows(adjusted, rows, greedy), lambda: greedy
    )
    # Every entry is asked: XLA's CPU compiler takes a maximum that passes over NaN (xla_cpu_enable_fast_min_max).
    return jnp.where(jnp.isfinite(logits).all(-1), token, -1)


def log_probabilities(logits: Array, token: Array, wanted: Array) -> tuple[Array, Array, Array]:
    """Of the model's own distribution: (token's [R], best ids [R, 20], theirs [R, 20]); zeros unless `wanted` []."""
    rows = logits.shape[0]

    def compute() -> tuple[Array, Array, Array]:
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        # Without the barrier XLA looks for the 20 best alone, by a program that takes a TPU's compiler 10 s more.
        best, ids = lax.optimization_barrier(_best(logits))
        best, ids = best[:, :MAX_LOGPROBS], ids[:, :MAX_LOGPROBS]
        chosen = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=-1)
        return (chosen - total)[:, 0], _widen(ids), _widen(best - total)

    def nothing() -> tuple[Array, Array, Array]:
        shape = (rows, MAX_LOGPROBS)
        return jnp.zeros(rows), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    return lax.cond(wanted, compute, nothing)


def _argmax(logits: Array) -> Array:
    """int32 [R]: the first best entry. By block maxima: XLA does not vectorise a plain argmax on a CPU."""
    rows, vocab = logits.shape
    if vocab % _BLOCK:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    blocks = logits.reshape(rows, -1, _BLOCK)
    block = jnp.argmax(blocks.max(-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _any(rows: Rows, bits: int) -> Array:
    return jnp.any(rows["flags"] & bits != 0)


def _has(rows: Rows, bit: int) -> Array:
    return (rows["flags"] & bit != 0)[:, None]


def _widen(x: Array) -> Array:
    """Pad the last axis to MAX_LOGPROBS (a vocabulary may be smaller)."""
    return jnp.pad(x, ((0, 0), (0, MAX_LOGPROBS - x.shape[1])))


def _adjust(logits: Array, rows: Rows, state: SlotState) -> Array:
    """Bias, penalties and bans, in that order."""
    slot, each = rows["slot"], jnp.arange(logits.shape[0])[:, None]
    vocab = logits.shape[1]
    bias_at = jnp.where(_has(rows, flag.BIAS), state.bias_ids[slot], vocab)
    logits = logits.at[each, bias_at].add(state.bias_values[slot], mode="drop")
    counts = state.counts[slot]
    logits = jnp.where(_has(rows, flag.PENALTIES), _penalise(logits, rows, counts), logits)
    logits = jnp.where(
        _has(rows, flag.ALLOWED) & (counts >= jnp.uint32(BANNED_BIT)), _NEVER, logits
    )
    early = _has(rows, flag.MIN_TOKENS) & (rows["kv_len"] < rows["min_len"])[:, None]
    banned = jnp.where(early, state.stop_ids[slot], vocab)
    return logits.at[each, banned].set(_NEVER, mode="drop")


def _penalise(logits: Array, rows: Rows, counts: Array) -> Array:
    """Repetition over prompt and output (Hugging Face's rule), presence and frequency over output (OpenAI's)."""
    seen = counts & (BANNED_BIT - 1)
    made = (counts & (PROMPT_BIT - 1)).astype(jnp.float32)
    repetition = rows["repetition"][:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen != 0, repeated, logits)
    presence = rows["presence"][:, None] * (made > 0)
    return logits - rows["frequency"][:, None] * made - presence


def _permit(logits: Array, rows: Rows, masks: Array, platform: str) -> Array:
    """Only what its mask leaves a row under a grammar."""
    allowed = unpack_bits(masks, logits.shape[1], platform)
    return jnp.where(_has(rows, flag.GRAMMAR) & ~allowed, _NEVER, logits)


def _best(logits: Array) -> tuple[Array, Array]:
    """The _CANDIDATES best (values, ids), best first, equal values by id. Exact: see _BLOCK."""
    rows, vocab = logits.shape
    if vocab % _BLOCK or vocab <= _CANDIDATES * _BLOCK:
        return lax.top_k(logits, min(_CANDIDATES, vocab))
    blocks = logits.reshape(rows, -1, _BLOCK)
    _, best_blocks = lax.top_k(blocks.max(-1), _CANDIDATES)
    best_blocks = jnp.sort(best_blocks, axis=-1)
    near = jnp.take_along_axis(blocks, best_blocks[..., None], axis=1).reshape(rows, -1)
    values, at = lax.top_k(near, _CANDIDATES)
    block = jnp.take_along_axis(best_blocks, at // _BLOCK, axis=-1)
    return values, block * _BLOCK + at % _BLOCK


def _draw_rows(logits: Array, rows: Rows, greedy: Array) -> Array:
    """The drawn token of rows that draw, the greedy one of the others."""
    scaled = logits / jnp.where(_has(rows, flag.DRAW), rows["temperature"][:, None], 1)
    scaled = scaled - scaled.max(-1, keepdims=True)
    uniform = jax.vmap(_uniform)(rows["seed_high"], rows["seed_low"], rows["kv_len"])
    near, settled = _draw_from_candidates(scaled, rows, uniform)
    draws = rows["flags"] & flag.DRAW != 0
    far = lax.cond(
        jnp.any(draws & ~settled), lambda: _draw_from_all(scaled, rows, uniform), lambda: near
    )
    return jnp.where(draws, jnp.where(settled, near, far), greedy)


def _uniform(seed_high: Array, seed_low: Array, position: Array) -> Array:
    words = jnp.stack([seed_high, seed_low]).astype(jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def _draw_from_candidates(scaled: Array, rows: Rows, uniform: Array) -> tuple[Array, Array]:
    """(token [R], whether the filters are settled by the candidates [R]). scaled: best logit 0."""
    values, ids = _best(scaled)
    weight = jnp.exp(values)
    k = rows["top_k"][:, None]
    everything = jnp.exp(scaled).sum(-1, keepdims=True)
    counted = (k > 0) & (k <= values.shape[1])
    weight = jnp.where(counted & (jnp.arange(values.shape[1]) >= k), 0, weight)
    mass = jnp.where(counted, weight.sum(-1, keepdims=True), everything)
    before = jnp.cumsum(weight, -1) - weight
    nucleus = rows["top_p"][:, None] * mass
    kept = jnp.where((before < nucleus) & (weight >= rows["min_p"][:, None]), weight, 0)
    # Else the first token left out by top-p or min-p must be among the candidates; and a nucleus of the top k with more
    # of them than there are candidates is a share of a mass that they do not tell.
    known = (k <= 0) | (rows["top_p"][:, None] >= 1)
    # A weight of nothing is past the last possible token, as under a grammar that leaves few: all are candidates.
    last = weight[:, -1:]
    left_out = (before[:, -1:] >= nucleus) | (last < rows["min_p"][:, None]) | (last == 0)
    settled = (counted | (known & left_out))[:, 0] | (ids.shape[1] == scaled.shape[1])
    at = _invert(jnp.cumsum(kept, -1), uniform)
    return jnp.take_along_axis(ids, at[:, None], axis=-1)[:, 0].astype(jnp.int32), settled


def _draw_from_all(scaled: Array, rows: Rows, uniform: Array) -> Array:
    """A token of the whole vocabulary under the same filters, found by thresholds instead of sorting."""
    vocab = scaled.shape[1]
    weight, order = jnp.exp(scaled), _ordered_bits(scaled)
    k = jnp.where(rows["top_k"] > 0, rows["top_k"], vocab).astype(jnp.float32)
    weight = jnp.where(order >= _threshold(order, jnp.ones_like(weight), k)[:, None], weight, 0)
    nucleus = rows["top_p"] * weight.sum(-1)
    low = jnp.where(rows["top_p"] < 1, _threshold(order, weight, nucleus), 0)
    kept = jnp.where((order >= low[:, None]) & (weight >= rows["min_p"][:, None]), weight, 0)
    # Two levels keep the sums short: a float32 running sum over 262,144 terms would lose the small ones.
    padded = jnp.pad(kept, ((0, 0), (0, -vocab % _BLOCK))).reshape(kept.shape[0], -1, _BLOCK)
    ends = jnp.cumsum(padded.sum(-1), -1)
    block = _invert(ends, uniform)
    row = jnp.arange(kept.shape[0])
    inside = jnp.cumsum(padded[row, block], -1)
    left = uniform * ends[:, -1] - jnp.where(block > 0, ends[row, jnp.maximum(block - 1, 0)], 0)
    at = _invert(inside, jnp.clip(left / inside[:, -1], 0, 1))
    return jnp.minimum(block * _BLOCK + at, vocab - 1).astype(jnp.int32)


def _invert(cumulative: Array, uniform: Array) -> Array:
    """First index whose cumulative weight exceeds uniform times the total, always one of positive weight."""
    total = cumulative[:, -1:]
    target = jnp.minimum(uniform[:, None] * total, jnp.nextafter(total, 0.0))
    return jnp.argmax(cumulative > target, axis=-1)


def _ordered_bits(x: Array) -> Array:
    """uint32 that order as the float32s do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: Array, weight: Array, target: Array) -> Array:
    """uint32 [R]: the largest t whose entries with order >= t still weigh `target` or more together."""

    def bit(index: Array, low: Array) -> Array:
        trial = low | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        enough = jnp.where(order >= trial[:, None], weight, 0).sum(-1) >= target
        return jnp.where(enough, trial, low)

    return lax.fori_loop(0, 32, bit, jnp.zeros(order.shape[0], jnp.uint32))
