"""Plans to device and back: packs a plan, launches the compiled step, unpacks its tokens. Owns every device array.

`dispatch` returns as soon as the step is launched; `collect` waits for it. Programs are compiled at the start from the
bucket table and called as executables, so a step can never trace or compile.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from onechip.cache.pages import PageTable
from onechip.config import ModelConfig
from onechip.engine import batch as flag
from onechip.engine import state as slots
from onechip.engine.batch import BatchLayout
from onechip.engine.buckets import Bucket, BucketTable
from onechip.engine.sequence import Plan, PlanRow, RowResult, Sequence
from onechip.engine.step import StepOut, logits_block, score_block, step
from onechip.kernels.attention import KV, storage_dtype
from onechip.request import GREEDY_BELOW, Request, SamplingParams, TokenLogprobs

_COMPILERS = min(
    4, os.cpu_count() or 1
)  # more would cost host memory: a large program takes gigabytes
SCORE_ROWS = 32  # positions whose full logits exist at once: 32 x 262,144 float32 are 34 MB


@dataclass(frozen=True)
class Pending:
    """A launched step: its plan and the device arrays it will fill."""

    plan: Plan
    out: Any


class Runner(Protocol):
    """What the loop needs of a device, or of a test double."""

    def dispatch(self, plan: Plan) -> Pending: ...
    def collect(self, pending: Pending) -> list[RowResult]: ...


@dataclass(frozen=True)
class Shapes:
    """The static facts that every program is compiled for."""

    config: ModelConfig
    dtype: str
    kv_dtype: str
    page_size: int
    max_seqs: int
    full_columns: int
    sliding_columns: int
    attention: str
    donate: bool = True

    def layout(self, bucket: Bucket) -> BatchLayout:
        return BatchLayout(bucket, self.full_columns, self.sliding_columns)


class DeviceRunner:
    """Runs plans on one jax device."""

    def __init__(
        self, shapes: Shapes, table: BucketTable, params: Any, pages: PageTable, device: Any
    ):
        self.shapes, self.table, self.params, self.pages = shapes, table, params, pages
        self.device = device
        with jax.default_device(device):
            self.caches = empty_caches(shapes, pages, device.platform)
            self.state = slots.empty_state(shapes.max_seqs, shapes.config.vocab_size)
        self.programs: dict[Bucket, Callable[..., Any]] = {}
        self.helpers: dict[str, Callable[..., Any]] = {}

    def compile(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile every program, smallest first, a few at a time: XLA's compilers leave the interpreter alone."""
        with ThreadPoolExecutor(_COMPILERS) as pool:
            compiling = [(b, pool.submit(self.lower(b).compile)) for b in self.table.buckets]
            for bucket, future in compiling:
                self.programs[bucket] = future.result()
                if progress is not None:
                    progress(f"{bucket.tokens} tokens, {bucket.rows} rows")
        self.helper("score")
        self.helper("admit")

    def program(self, bucket: Bucket) -> Callable[..., Any]:
        """The bucket's executable, compiled on first use."""
        if bucket not in self.programs:
            self.programs[bucket] = self.lower(bucket).compile()
        return self.programs[bucket]

    def helper(self, name: str) -> Callable[..., Any]:
        """One of the small programs beside the step, compiled on first use."""
        if name not in self.helpers:
            self.helpers[name] = self._lower_helper(name).compile()
        return self.helpers[name]

    def _lower_helper(self, name: str) -> Any:
        config = self.shapes.config
        if name == "admit":
            rows = slots.slot_rows(Request("", (0,), SamplingParams()), config.vocab_size)
            return jax.jit(slots.admit, donate_argnums=0).lower(self.state, np.int32(0), rows)
        hidden = jax.ShapeDtypeStruct((SCORE_ROWS, config.hidden_size), jnp.float32)
        if name == "logits":
            return jax.jit(partial(logits_block, config=config)).lower(self.params, hidden)
        target = jax.ShapeDtypeStruct((SCORE_ROWS,), jnp.int32)
        return jax.jit(partial(score_block, config=config)).lower(self.params, hidden, target)

    def lower(self, bucket: Bucket) -> Any:
        """One bucket's program, traced and lowered for the arrays this runner holds."""
        layout = self.shapes.layout(bucket)
        function = partial(
            step,
            config=self.shapes.config,
            layout=layout,
            page_size=self.shapes.page_size,
            attention=self.shapes.attention,
        )
        vector = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        return jax.jit(function, donate_argnums=(1, 2)).lower(
            self.params, self.caches, self.state, vector
        )

    def dispatch(self, plan: Plan) -> Pending:
        for sequence in plan.admitted:
            if row_flags(sequence.request.sampling) & ~(flag.SAMPLE | flag.DRAW | flag.LOGPROBS):
                rows = slots.slot_rows(sequence.request, self.shapes.config.vocab_size)
                self.state = self.helper("admit")(self.state, np.int32(_slot(sequence)), rows)
        singles = plan.singles == len(plan.rows)
        bucket = self.table.pick(plan.tokens, len(plan.rows), singles, plan.score)
        vector = self._pack(plan, bucket)
        self.caches, self.state, out = self.program(bucket)(
            self.params, self.caches, self.state, vector
        )
        return Pending(plan, out)

    def collect(self, pending: Pending) -> list[RowResult]:
        rows, out = pending.plan.rows, pending.out
        token = np.asarray(out.token)
        wanted = any(row.sequence.request.sampling.logprobs is not None for row in rows)
        logprobs = jax.device_get((out.logprob, out.top_ids, out.top_logprobs)) if wanted else None
        prompts = self._prompt_logprobs(pending.plan, out) if pending.plan.score else {}
        results: list[RowResult] = []
        for index, row in enumerate(rows):
            logprob = None
            if row.sample and row.sequence.request.sampling.logprobs is not None:
                assert logprobs is not None
                count = row.sequence.request.sampling.logprobs
                logprob = _entry(int(token[index]), logprobs, index, count)
            sampled = int(token[index]) if row.sample else None
            results.append(RowResult(row, sampled, logprob, prompts.get(index, ())))
        return results

    def logits(self, hidden: Any) -> np.ndarray:
        """float32 [n, V] of hidden states [n, D], a block at a time (offline scoring only)."""
        logits = self.helper("logits")
        blocks = [np.asarray(logits(self.params, block)) for block, _ in _blocks(hidden)]
        return np.concatenate(blocks)[: hidden.shape[0]]

    def _pack(self, plan: Plan, bucket: Bucket) -> np.ndarray:
        vector, fields = self.shapes.layout(bucket).pack()
        fields["slot"][:] = self.shapes.max_seqs  # padding's slot
        fields["singles"][...] = plan.singles
        at = 0
        for index, row in enumerate(plan.rows):
            known = row.known
            part = slice(at, at + row.count)
            fields["token"][part] = known if known else flag.FROM_DEVICE
            fields["row"][part] = index
            fields["q_start"][index] = at
            self._pack_row(fields, index, row)
            at += row.count
        return vector

    def _pack_row(self, fields: Mapping[str, np.ndarray], index: int, row: PlanRow) -> None:
        sequence, sampling = row.sequence, row.sequence.request.sampling
        fields["slot"][index] = _slot(sequence)
        fields["q_len"][index] = row.count
        fields["kv_len"][index] = row.start + row.count
        fields["prompt_len"][index] = sequence.prompt_len
        flags = row_flags(sampling)
        fields["flags"][index] = flags if row.sample else flags & ~(flag.SAMPLE | flag.DRAW)
        held = self.pages.held[sequence.id]
        for kind, pages in held.items():
            fields[f"{kind}_table"][index, : len(pages.pages)] = pages.pages
        if "sliding" in held:
            fields["first_page"][index] = held["sliding"].first
        if flags & ~flag.SAMPLE:
            _pack_sampling(fields, index, sequence.prompt_len, sampling)

    def _prompt_logprobs(self, plan: Plan, out: StepOut) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log probabilities of the prompt tokens that this step's positions predict, by row index."""
        found: dict[int, tuple[TokenLogprobs, ...]] = {}
        states = np.asarray(
            out.hidden
        )  # sliced on the host: on the device each length would be a program
        at = 0
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            stop = min(row.start + row.count + 1, sequence.prompt_len)
            targets = np.asarray(sequence.request.prompt_ids[row.start + 1 : stop], np.int32)
            hidden = states[at : at + len(targets)]
            count = sequence.request.sampling.prompt_logprobs
            if count is not None and len(targets):
                found[index] = self._score(hidden, targets, count)
            at += row.count
        return found

    def _score(self, hidden: Any, targets: np.ndarray, count: int) -> tuple[TokenLogprobs, ...]:
        entries: list[TokenLogprobs] = []
        for block, start in _blocks(hidden):
            wanted = targets[start : start + SCORE_ROWS]
            padded = np.zeros(SCORE_ROWS, np.int32)
            padded[: len(wanted)] = wanted
            scores = jax.device_get(self.helper("score")(self.params, block, padded))
            entries += [_entry(int(t), scores, i, count) for i, t in enumerate(wanted)]
        return tuple(entries)


def empty_caches(shapes: Shapes, pages: PageTable, platform: str) -> tuple[KV, ...]:
    """Zeroed pages of every K/V-owning layer."""
    dtype = storage_dtype(shapes.kv_dtype, platform)

    def one(kv_heads: int, head_dim: int, count: int) -> jax.Array:
        return jnp.zeros((kv_heads, count, shapes.page_size, head_dim), dtype)

    caches: list[KV] = []
    for layer in shapes.config.owners:
        count = pages.shapes[layer.kind].pages
        geometry = (layer.kv_heads, layer.head_dim, count)
        caches.append(KV(one(*geometry), one(*geometry), shapes.kv_dtype))
    return tuple(caches)


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "a planned sequence has a slot"
    return sequence.slot


def row_flags(sampling: SamplingParams) -> int:
    """The `flags` of a row that samples with these parameters."""
    penalties = (
        sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    )
    return (
        flag.SAMPLE
        | (flag.DRAW if sampling.temperature > GREEDY_BELOW else 0)
        | (flag.PENALTIES if penalties else 0)
        | (flag.BIAS if sampling.logit_bias else 0)
        | (flag.ALLOWED if sampling.allowed_token_ids is not None else 0)
        | (flag.MIN_TOKENS if sampling.min_tokens else 0)
        | (flag.LOGPROBS if sampling.logprobs is not None else 0)
    )


def _pack_sampling(
    fields: Mapping[str, np.ndarray], index: int, prompt_len: int, sampling: SamplingParams
) -> None:
    assert sampling.seed is not None
    fields["top_k"][index] = min(max(sampling.top_k, 0), 2**31 - 1)
    fields["seed_high"].view(np.uint32)[index] = sampling.seed >> 32
    fields["seed_low"].view(np.uint32)[index] = sampling.seed & 0xFFFFFFFF
    fields["min_len"][index] = prompt_len + sampling.min_tokens
    fields["temperature"][index] = sampling.temperature
    fields["top_p"][index] = sampling.top_p
    fields["min_p"][index] = sampling.min_p
    fields["presence"][index] = sampling.presence_penalty
    fields["frequency"][index] = sampling.frequency_penalty
    fields["repetition"][index] = sampling.repetition_penalty


def _entry(token: int, scores: Any, index: int, count: int) -> TokenLogprobs:
    """Plain Python numbers of one row of (logprob, top_ids, top_logprobs)."""
    logprob, top_ids, top_logprobs = scores
    return TokenLogprobs(
        token,
        float(logprob[index]),
        tuple(top_ids[index, :count].tolist()),
        tuple(top_logprobs[index, :count].tolist()),
    )


def _blocks(hidden: Any) -> list[tuple[np.ndarray, int]]:
    """Hidden states [n, D] in padded blocks of SCORE_ROWS, with where each starts."""
    rows = np.asarray(hidden)
    blocks: list[tuple[np.ndarray, int]] = []
    for start in range(0, rows.shape[0], SCORE_ROWS):
        block = rows[start : start + SCORE_ROWS]
        padding = ((0, SCORE_ROWS - block.shape[0]), (0, 0))
        blocks.append((np.pad(block, padding), start))
    return blocks
