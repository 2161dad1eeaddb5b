"""The compiled step: one program from packed ids to sampled tokens.

unpack -> take ids the host does not know from the slots -> forward over the paged K/V -> logits of each row's last
token -> sample -> keep the tokens in their slots. K/V and slots are donated: the results are the same memory. Sampled
ids never visit the host on their way to the next step.

A decode program repeats this up to `steps` times in one launch, each time with the tokens just made. A row that meets
one of the launch's stop ids, or has made what it may, writes nothing more; when all have, the launch ends.

The programs with prompts in them end with the logits, and `choose`, a small program of its own, samples them: one for
each number of rows, not a sampler to compile in every program. It alone knows log probabilities, so rows that ask for
them are sampled by it too, and so are rows under a grammar, a second time after a decode program: it is launched behind
the step, for a grammar when the masks are there. A mask needs the row's last token, which the host has only once the
step before has ended; this way the forward pass is long under way by then, and the masks are made beside it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass

from onechip.config import LayerKind, ModelConfig
from onechip.engine import batch as flag
from onechip.engine.batch import BatchLayout, row_part, unpack_rows
from onechip.engine.sampler import in_tiles, log_probabilities, sample
from onechip.engine.state import SlotState, count_tokens
from onechip.kernels.attention import KV, Ragged
from onechip.model import gemma
from onechip.request import MAX_LOGPROBS

SKIPPED = -2  # in StepOut.token: the row made no token in this step of the launch
_SCORE_ROWS = 32  # positions whose full logits exist at once: 32 x 262,144 float32 are 34 MB

Caches = tuple[KV, ...]
Fields = Mapping[str, Array]
Scores = tuple[Array, Array, Array]  # logprob [N], best ids [N, 20], theirs [N, 20]


@register_dataclass
@dataclass(frozen=True)
class StepOut:
    """token [K, R] int32, one row for each step of the launch (-1: logits not finite; SKIPPED).

    `chosen` are the tokens' scores, zeros until `choose` is asked for them. In score programs `prompt` holds those
    of every position's `target` and `hidden` [T, D] the states; else both are empty. `logits` float32 [R, V] of the
    last step stay on the device, for `choose`: only decode programs leave tokens.
    """

    token: Array
    chosen: Scores
    prompt: Scores
    hidden: Array
    logits: Array


def step(
    params: gemma.Params,
    caches: Caches,
    state: SlotState,
    vector: Array,
    *,
    config: ModelConfig,
    layout: BatchLayout,
    page_size: int,
    attention: str,
    experts: str,
    platform: str,
    most_steps: int = 1,
) -> tuple[Caches, SlotState, StepOut]:
    """Run one bucket's launch on a packed vector (`engine.batch`); K of the result is `most_steps`; only decode
    programs make more than one.
    """
    fields = layout.unpack(vector)
    bucket = layout.bucket
    once = partial(
        _once, params, config=config, score=bucket.score, sampled=bucket.decode,
        page_size=page_size, attention=attention, experts=experts, platform=platform,
    )  # fmt: skip
    if most_steps == 1:
        return once(caches, state, fields)
    if bucket.decode:
        return _several(once, caches, state, fields, most_steps)
    caches, state, out = once(caches, state, fields)
    rest = jnp.full((most_steps - 1, out.token.shape[1]), SKIPPED, jnp.int32)
    return caches, state, replace(out, token=jnp.concatenate([out.token, rest]))


def _once(
    params: gemma.Params,
    caches: Caches,
    state: SlotState,
    fields: Fields,
    *,
    config: ModelConfig,
    score: bool,
    sampled: bool,
    page_size: int,
    attention: str,
    experts: str,
    platform: str,
) -> tuple[Caches, SlotState, StepOut]:
    packed, owner = pack(fields, state, page_size)
    hidden, caches = gemma.forward(
        params, config, packed, caches,
        every_position=score, attention=attention, experts=experts, platform=platform,
    )  # fmt: skip
    every = hidden if score else hidden[:0]
    head = partial(gemma.logits, params, config, platform=platform)
    prompt = _score(head, hidden, fields, platform) if score else _no_scores(0)
    logits = head(hidden[packed.last] if score else hidden)
    state = replace(state, counts=_count(fields, state, packed, owner))
    rows = logits.shape[0]
    token = jnp.full(rows, SKIPPED, jnp.int32)
    if sampled:
        choice = partial(sample, state=state, platform=platform)
        token = in_tiles(choice, platform, logits, row_part(fields))
        state = _keep(state, token, fields["flags"] & flag.SAMPLE != 0, fields["slot"])
    return caches, state, StepOut(token[None], _no_scores(rows), prompt, every, logits)


def _several(
    once: Any, caches: Caches, state: SlotState, fields: Fields, most: int
) -> tuple[Caches, SlotState, StepOut]:
    """Up to fields["steps"] steps of the same rows, which have one token each."""
    rows = fields["q_len"].shape[0]
    heeds = fields["flags"] & flag.STOPS != 0

    def unfinished(carry: Any) -> Array:
        index, active, *_ = carry
        return (index < fields["steps"]) & jnp.any(active)

    def one(carry: Any) -> Any:
        index, active, tokens, _, caches, state = carry
        caches, state, out = once(caches, state, _advanced(fields, index, active))
        token = out.token[0]
        tokens = tokens.at[index].set(jnp.where(active, token, SKIPPED))
        stopped = heeds & (token[:, None] == fields["stops"]).any(1)
        active &= ~stopped & (token >= 0) & (index + 1 < fields["left"])
        return index + 1, active, tokens, out.logits, caches, state

    tokens = jnp.full((most, rows), SKIPPED, jnp.int32)
    logits = jnp.zeros((rows, state.counts.shape[1]), jnp.float32)
    start = (jnp.int32(0), fields["q_len"] > 0, tokens, logits, caches, state)
    _, _, tokens, logits, caches, state = lax.while_loop(unfinished, one, start)
    none = _no_scores(rows), _no_scores(0)
    return caches, state, StepOut(tokens, *none, jnp.zeros((0, 0)), logits)


def choose(
    state: SlotState,
    logits: Array,
    token: Array,
    scores: Scores,
    block: Array,
    masks: Array,
    *,
    platform: str,
) -> tuple[SlotState, Array, Scores]:
    """Sample the rows flagged SAMPLE, those flagged GRAMMAR under their masks (see `sampler.sample`); the others stay
    as they are.

    `token` [K, R] and `scores` are those of a launch of one step; `block`: its `BatchLayout.row_fields`, with the flags
    for this time.
    """
    rows = unpack_rows(block)
    mine = rows["flags"] & flag.SAMPLE != 0
    asked = mine & (rows["flags"] & flag.LOGPROBS != 0)
    choice = partial(_choice, state=state, platform=platform)
    new, found = in_tiles(choice, platform, logits, rows, masks)
    state = _keep(state, new, mine, rows["slot"])
    chosen = (
        jnp.where(asked, found[0], scores[0]),
        jnp.where(asked[:, None], found[1], scores[1]),
        jnp.where(asked[:, None], found[2], scores[2]),
    )
    return state, token.at[0].set(jnp.where(mine, new, token[0])), chosen


def _choice(
    logits: Array, rows: Fields, masks: Array, *, state: SlotState, platform: str
) -> tuple[Array, Scores]:
    """Each row's token, and the scores of them if a row asks."""
    token = sample(logits, rows, state, masks, platform)
    wanted = jnp.any(rows["flags"] & flag.LOGPROBS != 0)
    return token, log_probabilities(logits, token, wanted)


def _keep(state: SlotState, token: Array, wanted: Array, slot: Array) -> SlotState:
    """Sampled tokens into their slots, for the next step; those not `wanted` go to the spare one."""
    keep = jnp.where(wanted, slot, state.last_token.shape[0] - 1)
    return replace(state, last_token=state.last_token.at[keep].set(jnp.maximum(token, 0)))


def _advanced(fields: Fields, index: Array, active: Array) -> Fields:
    """The fields of the launch's step `index`: a token further, and rows that have ended are padding."""
    rows = active.shape[0]
    return {
        **fields,
        "kv_len": jnp.where(active, fields["kv_len"] + index, 0),
        "q_len": jnp.where(active, 1, 0),
        "row": jnp.where(active, fields["row"], rows),
        "flags": jnp.where(active, fields["flags"], 0),
        "token": jnp.where(index == 0, fields["token"], flag.FROM_DEVICE),
    }


def _score(head: Callable[[Array], Array], hidden: Array, fields: Fields, platform: str) -> Scores:
    """What each position's target was worth, as many blocks of positions as hold a token."""
    count = hidden.shape[0]
    padding = -count % _SCORE_ROWS
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    target = jnp.pad(fields["target"], (0, padding))
    blocks = -(-fields["q_len"].sum() // _SCORE_ROWS)

    def block(index: Array, found: Scores) -> Scores:
        start = index * _SCORE_ROWS
        logits = head(lax.dynamic_slice_in_dim(hidden, start, _SCORE_ROWS))
        targets = lax.dynamic_slice_in_dim(target, start, _SCORE_ROWS)
        parts = in_tiles(
            partial(log_probabilities, wanted=jnp.bool_(True)), platform, logits, targets
        )
        scores = [
            lax.dynamic_update_slice_in_dim(a, b, start, 0)
            for a, b in zip(found, parts, strict=True)
        ]
        return scores[0], scores[1], scores[2]

    logprob, ids, best = lax.fori_loop(0, blocks, block, _no_scores(count + padding))
    return logprob[:count], ids[:count], best[:count]


def _no_scores(count: int) -> Scores:
    shape = (count, MAX_LOGPROBS)
    return jnp.zeros(count), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)


def hidden_states(
    params: gemma.Params,
    caches: Caches,
    state: SlotState,
    vector: Array,
    *,
    config: ModelConfig,
    layout: BatchLayout,
    page_size: int,
    attention: str,
    experts: str,
    platform: str,
    every_position: bool,
) -> tuple[Array, Caches]:
    """What the layers make of a step's packed vector, alone: to count what they cost. As `gemma.forward`."""
    packed, _ = pack(layout.unpack(vector), state, page_size)
    return gemma.forward(
        params, config, packed, caches,
        every_position=every_position, attention=attention, experts=experts, platform=platform,
    )  # fmt: skip


def logits_block(
    params: gemma.Params, hidden: Array, *, config: ModelConfig, platform: str
) -> Array:
    """float32 [B, V] after hidden states [B, D]."""
    return gemma.logits(params, config, hidden, platform)


def pack(fields: Fields, state: SlotState, page_size: int) -> tuple[gemma.Packed, Array]:
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


def _count(fields: Fields, state: SlotState, packed: gemma.Packed, owner: Array) -> Array:
    """Count this step's input tokens for rows with penalties; the others' go to the spare slot."""
    spare = state.counts.shape[0] - 1
    counted = (fields["flags"] & flag.PENALTIES != 0)[owner] & (
        fields["row"] < fields["q_len"].shape[0]
    )
    slot = jnp.where(counted, fields["slot"][owner], spare)
    return count_tokens(state, slot, packed.token, packed.position < fields["prompt_len"][owner])
