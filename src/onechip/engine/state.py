"""What the device keeps of each slot between steps: its last token, and what unusual sampling parameters need.

A slot is a place in the batch, held by one sequence at a time; slot S, one past the last, is where padding goes. Rows
without penalties, bias or masks never read the rest, so only `admit` for such a request pays to write it.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from onechip.request import MAX_LOGIT_BIAS, MAX_STOP_IDS, Request

PROMPT_BIT = (
    0x8000  # in `counts`: the token occurs in the prompt; the lower bits count it in the output
)


@register_dataclass
@dataclass(frozen=True)
class SlotState:
    """last_token [S+1] int32; counts [S+1, V] uint16; bias_ids, bias_values [S+1, MAX_LOGIT_BIAS];
    allowed [S+1, ceil(V/32)] uint32; stop_ids [S+1, MAX_STOP_IDS] int32, padded with V.
    """

    last_token: Array
    counts: Array
    bias_ids: Array
    bias_values: Array
    allowed: Array
    stop_ids: Array


def empty_state(slots: int, vocab: int) -> SlotState:
    """A SlotState of numpy arrays, to be put on the device: making it there would compile."""
    rows = slots + 1
    arrays: dict[str, Any] = {
        "last_token": np.zeros(rows, np.int32),
        "counts": np.zeros((rows, vocab), np.uint16),
        "bias_ids": np.full((rows, MAX_LOGIT_BIAS), vocab, np.int32),
        "bias_values": np.zeros((rows, MAX_LOGIT_BIAS), np.float32),
        "allowed": np.zeros((rows, -(-vocab // 32)), np.uint32),
        "stop_ids": np.full((rows, MAX_STOP_IDS), vocab, np.int32),
    }
    return SlotState(**arrays)


def state_bytes(slots: int, vocab: int) -> int:
    """Bytes of a SlotState on the device."""
    each = 4 + 2 * vocab + 8 * MAX_LOGIT_BIAS + 4 * -(-vocab // 32) + 4 * MAX_STOP_IDS
    return (slots + 1) * each


def slot_rows(request: Request, vocab: int) -> dict[str, np.ndarray]:
    """The host's copy of one slot's rows, for `admit`."""
    sampling = request.sampling
    bias_ids = np.full(MAX_LOGIT_BIAS, vocab, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(sampling.logit_bias)] = list(sampling.logit_bias)
    bias_values[: len(sampling.logit_bias)] = list(sampling.logit_bias.values())
    allowed = np.zeros(-(-vocab // 32), np.uint32)
    for token in sampling.allowed_token_ids or ():
        allowed[token >> 5] |= np.uint32(1 << (token & 31))
    stop_ids = np.full(MAX_STOP_IDS, vocab, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    return {
        "bias_ids": bias_ids, "bias_values": bias_values, "allowed": allowed, "stop_ids": stop_ids
    }  # fmt: skip


def admit(state: SlotState, slot: Array, rows: dict[str, Array]) -> SlotState:
    """A new sequence takes `slot`: its rows written, its counts cleared."""
    written = {name: getattr(state, name).at[slot].set(row) for name, row in rows.items()}
    return replace(state, counts=state.counts.at[slot].set(0), **written)


def count_tokens(state: SlotState, slot: Array, token: Array, prompt: Array) -> Array:
    """`counts` after tokens [T] of slots [T] (S for those not counted); `prompt` bool [T] says which are prompt's.

    Prompt tokens precede output tokens in a sequence, so setting the bit by a maximum never loses a count.
    """
    spare = state.counts.shape[0] - 1
    mark = state.counts.at[jnp.where(prompt, slot, spare), token].max(jnp.uint16(PROMPT_BIT))
    return mark.at[jnp.where(prompt, spare, slot), token].add(jnp.uint16(1))
