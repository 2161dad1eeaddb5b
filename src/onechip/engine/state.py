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

# In `counts`, above the number of times a token occurs in the output:
PROMPT_BIT = 1 << 30  # the token occurs in the prompt
BANNED_BIT = 1 << 31  # the request does not allow it


@register_dataclass
@dataclass(frozen=True)
class SlotState:
    """last_token [S+1] int32; counts [S+1, V] uint32; bias_ids, bias_values [S+1, MAX_LOGIT_BIAS];
    stop_ids [S+1, MAX_STOP_IDS] int32, padded with V.
    """

    last_token: Array
    counts: Array
    bias_ids: Array
    bias_values: Array
    stop_ids: Array


def empty_state(slots: int, vocab: int) -> SlotState:
    """A SlotState of numpy arrays, to be put on the device: making it there would compile."""
    rows = slots + 1
    arrays: dict[str, Any] = {
        "last_token": np.zeros(rows, np.int32),
        "counts": np.zeros((rows, vocab), np.uint32),
        "bias_ids": np.full((rows, MAX_LOGIT_BIAS), vocab, np.int32),
        "bias_values": np.zeros((rows, MAX_LOGIT_BIAS), np.float32),
        "stop_ids": np.full((rows, MAX_STOP_IDS), vocab, np.int32),
    }
    return SlotState(**arrays)


def state_bytes(slots: int, vocab: int) -> int:
    """Bytes of a SlotState on the device."""
    each = 4 + 4 * vocab + 8 * MAX_LOGIT_BIAS + 4 * MAX_STOP_IDS
    return (slots + 1) * each


def slot_rows(request: Request, vocab: int) -> dict[str, np.ndarray]:
    """The host's copy of one slot's rows, for `admit`."""
    sampling = request.sampling
    bias_ids = np.full(MAX_LOGIT_BIAS, vocab, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(sampling.logit_bias)] = list(sampling.logit_bias)
    bias_values[: len(sampling.logit_bias)] = list(sampling.logit_bias.values())
    counts = np.zeros(vocab, np.uint32)
    if sampling.allowed_token_ids is not None:
        counts[:] = BANNED_BIT
        counts[list(sampling.allowed_token_ids)] = 0
    stop_ids = np.full(MAX_STOP_IDS, vocab, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    return {
        "bias_ids": bias_ids, "bias_values": bias_values, "counts": counts, "stop_ids": stop_ids
    }  # fmt: skip


def admit(state: SlotState, slot: Array, rows: dict[str, Array]) -> SlotState:
    """A new sequence takes `slot`: its rows written."""
    written = {name: getattr(state, name).at[slot].set(row) for name, row in rows.items()}
    return replace(state, **written)


def count_tokens(state: SlotState, slot: Array, token: Array, prompt: Array) -> Array:
    """`counts` after tokens [T] of slots [T] (S for those not counted); `prompt` bool [T] says which are prompt's.

    A prompt's tokens are marked, however often they occur, an output's counted.
    """
    spare = state.counts.shape[0] - 1
    marked, counted = jnp.where(prompt, slot, spare), jnp.where(prompt, spare, slot)
    mark = state.counts[marked, token] | jnp.uint32(PROMPT_BIT)
    return state.counts.at[marked, token].set(mark).at[counted, token].add(jnp.uint32(1))
