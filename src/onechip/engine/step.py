"""The compiled step: one program from packed ids to sampled tokens.

unpack -> take ids the host does not know from the slots -> forward over the paged K/V -> logits of each row's last
token -> sample -> keep the tokens in their slots. K/V and slots are donated: the results are the same memory. Sampled
ids never visit the host on their way to the next step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from onechip.config import LayerKind, ModelConfig
from onechip.engine import batch as flag
from onechip.engine.batch import BatchLayout
from onechip.engine.sampler import log_probabilities, sample
from onechip.engine.state import SlotState, count_tokens
from onechip.kernels.attention import KV, Ragged
from onechip.model import gemma


@register_dataclass
@dataclass(frozen=True)
class StepOut:
    """token [R] int32 (-1: logits not finite). The rest is zeros unless a row asked for log probabilities:
    logprob [R], top_ids and top_logprobs [R, 20]. `hidden` [T, D] in score programs, else [0, D].
    """

    token: Array
    logprob: Array
    top_ids: Array
    top_logprobs: Array
    hidden: Array


def step(
    params: gemma.Params,
    caches: tuple[KV, ...],
    state: SlotState,
    vector: Array,
    *,
    config: ModelConfig,
    layout: BatchLayout,
    page_size: int,
    attention: str,
) -> tuple[tuple[KV, ...], SlotState, StepOut]:
    """Run one bucket's step on a packed vector (`engine.batch`)."""
    fields = layout.unpack(vector)
    bucket = layout.bucket
    packed, owner = _pack(fields, state, page_size)
    hidden, caches = gemma.forward(
        params, config, packed, caches, every_position=bucket.score, attention=attention
    )
    every = hidden if bucket.score else hidden[:0]
    last = hidden[packed.last] if bucket.score else hidden
    logits = gemma.logits(params, config, last)
    state = replace(state, counts=_count(fields, state, packed, owner))
    token = sample(logits, fields, state)
    wanted = jnp.any(fields["flags"] & flag.LOGPROBS != 0)
    logprob, top_ids, top_logprobs = log_probabilities(logits, token, wanted)
    spare = state.last_token.shape[0] - 1
    keep = jnp.where(fields["flags"] & flag.SAMPLE != 0, fields["slot"], spare)
    state = replace(state, last_token=state.last_token.at[keep].set(jnp.maximum(token, 0)))
    return caches, state, StepOut(token, logprob, top_ids, top_logprobs, every)


def score_block(params: gemma.Params, hidden: Array, target: Array, *, config: ModelConfig) -> Any:
    """Log probabilities of `target` [B] after hidden states [B, D]: what a prompt's tokens were worth."""
    return log_probabilities(gemma.logits(params, config, hidden), target, jnp.bool_(True))


def logits_block(params: gemma.Params, hidden: Array, *, config: ModelConfig) -> Array:
    """float32 [B, V] after hidden states [B, D]."""
    return gemma.logits(params, config, hidden)


def _pack(
    fields: Mapping[str, Array], state: SlotState, page_size: int
) -> tuple[gemma.Packed, Array]:
    """The model's view of the fields, and each token's row; padding has row 0, position 0 and page 0."""
    rows = fields["q_len"].shape[0]
    real = fields["row"] < rows
    owner = jnp.where(real, fields["row"], 0)
    offset = jnp.arange(owner.shape[0], dtype=jnp.int32) - fields["q_start"][owner]
    begin = fields["kv_len"] - fields["q_len"]
    position = jnp.where(real, begin[owner] + offset, 0)
    known = fields["token"] != flag.FROM_DEVICE
    token = jnp.where(known, fields["token"], state.last_token[fields["slot"][owner]])
    pools: dict[LayerKind, gemma.PoolRows] = {}
    zero = jnp.zeros(rows, jnp.int32)
    firsts: dict[LayerKind, Array] = {"full": zero, "sliding": fields["first_page"]}
    for kind, first in firsts.items():
        table = fields[f"{kind}_table"]
        ragged = Ragged(
            fields["q_start"], fields["q_len"], fields["kv_len"], table, first, fields["singles"]
        )
        page = jnp.where(real, table[owner, position // page_size - first[owner]], 0)
        pools[kind] = gemma.PoolRows(ragged, page, position % page_size)
    last = jnp.maximum(fields["q_start"] + fields["q_len"] - 1, 0)
    return gemma.Packed(token, position, last, pools), owner


def _count(
    fields: Mapping[str, Array], state: SlotState, packed: gemma.Packed, owner: Array
) -> Array:
    """Count this step's input tokens for rows with penalties; the others' go to the spare slot."""
    spare = state.counts.shape[0] - 1
    counted = (fields["flags"] & flag.PENALTIES != 0)[owner] & (
        fields["row"] < fields["q_len"].shape[0]
    )
    slot = jnp.where(counted, fields["slot"][owner], spare)
    return count_tokens(state, slot, packed.token, packed.position < fields["prompt_len"][owner])
