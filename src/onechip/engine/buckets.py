"""The shapes a step may have. Every one of them is compiled before the engine is ready; there are no others.

A bucket is (tokens, rows): a step is padded up to the smallest that holds it. Decode buckets have one token a row.
Mixed buckets carry prefill chunks too. Accelerators stream the weights whatever the row count, so they get few, coarse
buckets; a CPU is bound by arithmetic and gets finer ones, and never a matmul of one row (XLA's CPU compiler runs those
as a ten times slower dot).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from onechip.errors import ConfigError

CPU_CHUNK = 512
CPU_FINE_ROWS = (
    16  # up to so many sequences a CPU's decode buckets double, beyond they grow by four
)
ACCELERATOR_CHUNK = 512
ACCELERATOR_SCORED = 128  # a chunk with log probabilities: rare, and all layers run for all of it
# A page is what an accelerator copies at once: 64 tokens of one K/V head are 32 to 64 KiB. Smaller ones cost more to
# ask for than to move, larger ones make shared prefixes coarse.
CPU_PAGE = 16
ACCELERATOR_PAGE = 64


_TILE = 8  # rows of an accelerator's tile


@dataclass(frozen=True, order=True)
class Bucket:
    """Packed tokens and rows of one program; `score` programs return every position's hidden state."""

    tokens: int
    rows: int
    score: bool = False

    @property
    def decode(self) -> bool:
        return self.tokens == self.rows and not self.score


@dataclass(frozen=True)
class BucketTable:
    """Every program of an engine, smallest first."""

    buckets: tuple[Bucket, ...]
    chunk: int

    def pick(self, tokens: int, rows: int, singles_only: bool, score: bool) -> Bucket:
        """The smallest bucket that holds a step. One always does: the scheduler plans within `token_budget`."""
        for bucket in self.buckets:
            fits = tokens <= bucket.tokens and rows <= bucket.rows and bucket.score == score
            if fits and (singles_only or not bucket.decode):
                return bucket
        raise AssertionError(f"no bucket for {tokens} tokens in {rows} rows")

    @property
    def token_budget(self) -> int:
        """Most tokens a step may carry."""
        return max(bucket.tokens for bucket in self.buckets)

    def first(self) -> tuple[Bucket, ...]:
        """The least that serves any request, if slowly: the smallest decode bucket and the smallest mixed one."""
        mixed = [bucket for bucket in self.buckets if not bucket.decode and not bucket.score]
        return tuple(dict.fromkeys((self.buckets[0], mixed[0])))

    def only(self, ready: Collection[Any]) -> "BucketTable":
        """The table without the buckets that are not among `ready`."""
        return BucketTable(tuple(b for b in self.buckets if b in ready), self.chunk)

    def limits(self) -> "Limits":
        """What a plan may hold so that one of these buckets fits it: they may be only a part of the full table."""
        mixed = max(
            (b for b in self.buckets if not b.decode and not b.score),
            key=lambda bucket: (bucket.rows, bucket.tokens),
        )
        score = max((b.tokens for b in self.buckets if b.score), default=0)
        chunk = min(self.chunk, mixed.tokens)
        return Limits(mixed.rows, chunk, mixed.tokens, min(score, self.chunk))


@dataclass(frozen=True)
class Limits:
    """Most rows, prefill tokens and tokens of one plan; `score`: most tokens of a scored chunk, 0 for none."""

    rows: int
    chunk: int
    budget: int
    score: int


def page_size_for(platform: str) -> int:
    """Tokens a K/V page holds when nobody says."""
    return CPU_PAGE if platform == "cpu" else ACCELERATOR_PAGE


def bucket_table(max_seqs: int, chunk_size: int | None, platform: str) -> BucketTable:
    """Decode buckets for 1..max_seqs rows, mixed ones for chunks up to chunk_size, one for prompt log probabilities."""
    if max_seqs < 1:
        raise ConfigError(f"max_seqs is {max_seqs}; it must be at least 1")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size}; it must be at least 1 token")
    cpu = platform == "cpu"
    chunk = chunk_size or (CPU_CHUNK if cpu else ACCELERATOR_CHUNK)
    growth = 8 if not cpu else 2 if max_seqs <= CPU_FINE_ROWS else 4
    # Eight rows fill the least tile of an accelerator's matmul: one alone is no faster, and more come in eights.
    least = 2 if cpu else min(_TILE, max_seqs)
    most = max_seqs if cpu or max_seqs <= _TILE else -(-max_seqs // _TILE) * _TILE
    rows = _ladder(least, max(most, least), growth)
    few, most = min(4 if cpu else _TILE, rows[-1]), rows[-1]
    decode = [Bucket(r, r) for r in rows]
    # A prompt alone should not pay for the logits of max_seqs rows. On an accelerator it is the weights that cost, and
    # a chunk hides behind them what it computes; a CPU computes what it is given.
    lone = 64 if cpu else chunk
    full = [128, chunk] if cpu else [chunk]
    mixed = [Bucket(_above(min(lone, chunk), few), few)] if few < most else []
    mixed += [Bucket(_above(min(t, chunk), most), most) for t in full]
    scored = chunk if cpu else min(chunk, ACCELERATOR_SCORED)
    score = [Bucket(_above(scored, few), few, score=True)]
    return BucketTable(tuple(sorted({*decode, *mixed, *score})), chunk)


def _ladder(least: int, most: int, growth: int) -> list[int]:
    steps: list[int] = []
    while least < most:
        steps.append(least)
        least *= growth
    return [*steps, most]


def _above(tokens: int, rows: int) -> int:
    """A mixed bucket has room for every row's decode token beside the chunk, and is never square."""
    return max(tokens, rows + 1)
