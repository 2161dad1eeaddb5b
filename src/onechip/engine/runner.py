"""Plans to device and back: packs a plan, launches the compiled step, unpacks its tokens. Owns every device array.

`dispatch` returns as soon as the step is launched; `constrain` launches what is left of it once the masks of rows
under a grammar are known; `collect` waits for it. Programs (`engine.programs`) are compiled at the start from the
bucket table and called as executables, so a step can never trace or compile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from onechip.cache.pages import PageTable
from onechip.engine import batch as flag
from onechip.engine import state as slots
from onechip.engine.batch import ROW_FLAGS
from onechip.engine.buckets import Bucket, BucketTable, Limits
from onechip.engine.grammar import RowMask
from onechip.engine.programs import LOGITS_ROWS, Choose, Programs, Shapes, to_device, zeros_on
from onechip.engine.sequence import Plan, PlanRow, RowResult, Sequence
from onechip.engine.step import SKIPPED, StepOut
from onechip.kernels.bits import mask_bytes
from onechip.request import GREEDY_BELOW, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Pending:
    """A launched step: its plan, the device arrays it will fill, its program and the row fields it was given."""

    plan: Plan
    out: Any
    bucket: Bucket | None = None
    block: np.ndarray | None = None


class Runner(Protocol):
    """What the loop needs of a device, or of a test double."""

    def dispatch(self, plan: Plan) -> Pending: ...
    def constrain(self, pending: Pending, masks: Mapping[int, RowMask]) -> Pending: ...
    def collect(self, pending: Pending) -> list[RowResult]: ...


class DeviceRunner:
    """Runs plans on one jax device."""

    def __init__(
        self,
        shapes: Shapes,
        table: BucketTable,
        params: Any,
        pages: PageTable,
        device: Any,
        programs: Programs | None = None,
    ):
        """`table` is what the programs will be in the end; those not ready yet are left out by `limits`."""
        self.shapes, self.params, self.pages = shapes, params, pages
        self.table = self.whole = table
        self.programs = programs or Programs(shapes, device)
        self._complete = self._looked = False
        self.caches = shapes.caches(zeros_on(device))
        state = slots.empty_state(shapes.max_seqs, shapes.config.vocab_size)
        self.state = jax.tree.map(partial(to_device, device=device), state)
        self._device = device
        self._masks: dict[int, jax.Array] = {}  # by rows, of nothing but zeros

    def limits(self) -> Limits | None:
        """What plans may hold, when programs have become ready since the last look; raises if one never will."""
        if self._complete:
            return None
        self._complete = self.programs.check()
        there = self.programs.ready
        # A row under a grammar needs its second program too.
        ready = [b for b in self.whole.buckets if b in there and Choose(b.rows) in there]
        if len(ready) == len(self.table.buckets) and self._looked:
            return None
        self._looked = True
        self.table = self.whole.only(ready)
        return self.table.limits()

    def dispatch(self, plan: Plan) -> Pending:
        for sequence in plan.admitted:
            if row_flags(sequence.request.sampling) & ~(flag.SAMPLE | flag.DRAW | flag.LOGPROBS):
                rows = slots.slot_rows(sequence.request, self.shapes.config.vocab_size)
                self.state = self.programs["admit"](self.state, np.int32(_slot(sequence)), rows)
        singles = plan.singles == len(plan.rows)
        bucket = self.table.pick(plan.tokens, len(plan.rows), singles, plan.score)
        vector = self._pack(plan, bucket)
        self.caches, self.state, out = self.programs[bucket](
            self.params, self.caches, self.state, vector
        )
        block = self.shapes.layout(bucket).row_fields(vector)
        pending = Pending(plan, out, bucket, block)
        chosen = [not bucket.decode or _scored(row) for row in plan.rows]
        if not any(chosen):
            return pending
        # `constrain` writes into the pending one, and the device may still be reading.
        block = block.copy()
        block[ROW_FLAGS, : len(chosen)] *= chosen
        return self._choose(pending, block, self._free(bucket))

    def constrain(self, pending: Pending, masks: Mapping[int, RowMask]) -> Pending:
        """Launch the sampling of the rows in `masks` (by index) behind their step, which was one of one token a row.

        For 262,144 ids 32 KB a row cross over, 2 MB for 64 rows, beside the step: no time worth saving.
        """
        plan, bucket, block = pending.plan, pending.bucket, pending.block
        assert bucket is not None and block is not None and plan.steps == 1
        block[ROW_FLAGS] = 0
        size = mask_bytes(self.shapes.config.vocab_size)
        bits = np.zeros((bucket.rows, size), np.uint8)
        for index, mask in masks.items():
            flags = row_flags(plan.rows[index].sequence.request.sampling) | flag.GRAMMAR
            block[ROW_FLAGS, index] = flags & ~flag.MIN_TOKENS if mask.forced else flags
            bits[index] = mask.words.view(np.uint8)
        return self._choose(pending, block, bits)

    def _choose(self, pending: Pending, block: np.ndarray, masks: Any) -> Pending:
        """Launch the sampling of a launch's rows, flagged in `block`, behind it."""
        out, bucket = pending.out, pending.bucket
        assert bucket is not None
        self.state, token, chosen = self.programs[Choose(bucket.rows)](
            self.state, out.logits, out.token, out.chosen, block, masks
        )
        return replace(pending, out=replace(out, token=token, chosen=chosen))

    def _free(self, bucket: Bucket) -> jax.Array:
        """Masks for rows under no grammar: nobody reads them."""
        if bucket.rows not in self._masks:
            size = mask_bytes(self.shapes.config.vocab_size)
            self._masks[bucket.rows] = jax.device_put(
                np.zeros((bucket.rows, size), np.uint8), self._device
            )
        return self._masks[bucket.rows]

    def collect(self, pending: Pending) -> list[RowResult]:
        rows, out = pending.plan.rows, pending.out
        token = np.asarray(out.token)
        wanted = any(row.sequence.request.sampling.logprobs is not None for row in rows)
        chosen = jax.device_get(out.chosen) if wanted else None
        prompts = _prompt_logprobs(pending.plan, out) if pending.plan.score else {}
        results: list[RowResult] = []
        for index, row in enumerate(rows):
            made = token[: row.steps, index].tolist() if row.sample else []
            tokens = tuple(t for t in made if t != SKIPPED)
            count, logprob = row.sequence.request.sampling.logprobs, None
            if tokens and count is not None:
                logprob = _entry(tokens[0], chosen, index, count)
            results.append(RowResult(row, tokens, logprob, prompts.get(index, ())))
        return results

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [n, V] of hidden states [n, D], a block at a time (offline scoring only)."""
        program, count = self.programs["logits"], hidden.shape[0]
        padded = np.pad(hidden, ((0, -count % LOGITS_ROWS), (0, 0)))
        starts = range(0, count, LOGITS_ROWS)
        blocks = [program(self.params, padded[start : start + LOGITS_ROWS]) for start in starts]
        return np.concatenate([np.asarray(block) for block in blocks])[:count]

    def _pack(self, plan: Plan, bucket: Bucket) -> np.ndarray:
        vector, fields = self.shapes.layout(bucket).pack()
        fields["slot"][:] = self.shapes.max_seqs  # padding's slot
        fields["singles"][...] = plan.singles
        fields["steps"][...] = plan.steps
        _pack_stops(fields["stops"], plan)
        at = 0
        for index, row in enumerate(plan.rows):
            known = row.known
            part = slice(at, at + row.count)
            fields["token"][part] = known if known else flag.FROM_DEVICE
            fields["row"][part] = index
            fields["q_start"][index] = at
            if bucket.score:
                targets = row.sequence.tokens[row.start + 1 : row.start + 1 + row.count]
                fields["target"][at : at + len(targets)] = targets
            self._pack_row(fields, index, row)
            at += row.count
        return vector

    def _pack_row(self, fields: Mapping[str, np.ndarray], index: int, row: PlanRow) -> None:
        sequence, sampling = row.sequence, row.sequence.request.sampling
        fields["slot"][index] = _slot(sequence)
        fields["q_len"][index] = row.count
        fields["kv_len"][index] = row.start + row.count
        fields["prompt_len"][index] = sequence.prompt_len
        fields["left"][index] = row.steps
        flags = row_flags(sampling)
        if row.steps > 1 and sequence.request.stop_ids:
            flags |= flag.STOPS
        flags = flags if row.sample else flags & ~(flag.SAMPLE | flag.DRAW)
        # A row under a grammar is sampled by `constrain`; the step counts its tokens.
        first = flags & (flag.SAMPLE | flag.PENALTIES)
        fields["flags"][index] = flags if sequence.grammar is None else first
        held = self.pages.held[sequence.id]
        for kind, pages in held.items():
            fields[f"{kind}_table"][index, : len(pages.pages)] = pages.pages
        if "sliding" in held:
            fields["first_page"][index] = held["sliding"].first
        if flags & ~flag.SAMPLE:
            _pack_sampling(fields, index, sequence.prompt_len, sampling)


def _scored(row: PlanRow) -> bool:
    """Whether the row's log probabilities are wanted now: under a grammar they come with its mask."""
    return row.sequence.request.sampling.logprobs is not None and row.sequence.grammar is None


def _pack_stops(stops: np.ndarray, plan: Plan) -> None:
    """The stop ids that rows of a launch of several steps heed: all the same, or none (`engine.scheduler`)."""
    if plan.steps > 1:
        ids = next(
            (r.sequence.request.stop_ids for r in plan.rows if r.sequence.request.stop_ids), ()
        )
        stops[: len(ids)] = ids


def _prompt_logprobs(plan: Plan, out: StepOut) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Log probabilities of the prompt tokens that this step's positions predict, by row index."""
    scores = jax.device_get(out.prompt)
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    at = 0
    for index, row in enumerate(plan.rows):
        request = row.sequence.request
        targets = request.prompt_ids[row.start + 1 : row.start + row.count + 1]
        count = request.sampling.prompt_logprobs
        if count is not None and targets:
            found[index] = tuple(_entry(t, scores, at + i, count) for i, t in enumerate(targets))
        at += row.count
    return found


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
