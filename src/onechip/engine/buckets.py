"""The shapes a step may have. Every one of them is compiled before the engine is ready; there are no others.

A bucket is (tokens, rows): a step is padded up to the smallest that holds it. Decode buckets have one token a row.
Mixed buckets carry prefill chunks too. Accelerators stream the weights whatever the row count, so they get few, coarse
buckets; a CPU is bound by arithmetic and gets finer ones, and never a matmul of one row (XLA's CPU compiler runs those
as a ten times slower dot).
"""

from dataclasses import dataclass

from onechip.errors import ConfigError

CPU_CHUNK = 512
ACCELERATOR_CHUNK = 512
# A page is what an accelerator copies at once: 64 tokens of one K/V head are 32 to 64 KiB. Smaller ones cost more to
# ask for than to move, larger ones make shared prefixes coarse.
CPU_PAGE = 16
ACCELERATOR_PAGE = 64


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
    least, growth = (2, 2) if cpu else (1, 8)
    rows = _ladder(least, max(max_seqs, least), growth)
    decode = [Bucket(r, r) for r in rows]
    few = min(4, rows[-1])
    # A lone prompt should not pay for the logits of max_seqs rows; more than a few rows come with decodes anyway.
    lone = [
        Bucket(t, few)
        for t in _ladder(min(64, _above(chunk, few)), _above(chunk, few), 4 if cpu else 8)
    ]
    full = [
        Bucket(_above(t, rows[-1]), rows[-1]) for t in ([128, chunk] if chunk > 128 else [chunk])
    ]
    score = [Bucket(_above(chunk, few), few, score=True)]
    mixed = (lone if few < rows[-1] else []) + full
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
