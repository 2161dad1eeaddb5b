"""Arithmetic on the marks of answers: the definitions of every figure a cell carries.

Owns the definitions. All are functions of what a record keeps (`Repeat`), so that a reader can compute each one again;
tests do. Per request, with times from `sent`:

- TTFT: to the first text chunk. (vLLM's bench takes a chat's first chunk, which may be empty and names only the role.)
- E2E: to the finish chunk. End-to-end tok/s: completion tokens / E2E.
- TPOT: (E2E - TTFT) / (completion tokens - 1), as in vLLM's bench. Decode tok/s is its inverse.
- ITL: gaps between neighbouring text chunks, one a gap, however many tokens a chunk carries (as in vLLM's bench).

Per repeat: wall is the first send to the last finish chunk, and output tok/s the completion tokens of all good requests
over it. Per cell: the median of the repeats with spread (max - min) / min, and percentiles over the requests of all.
Goodput: good requests within every target, over the wall. Tokens are the server's usage.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise

from onechip.ladder import stats
from onechip.ladder.record import Figures, Repeat, Request
from onechip.ladder.stream import Answer, Failure

NO_USAGE = Failure("malformed", "the server sent no usage, so its tokens cannot be counted")
METRICS = ("ttft", "tpot", "itl", "e2e")


def request_of(answer: Answer, start: float, prompt: str | None = None) -> Request:
    """What a record keeps of an answer; `start` is the repeat's first send."""
    usage = answer.usage
    error = answer.error or (NO_USAGE if usage is None else None)
    said = answer.reasoning + answer.text
    return Request(
        sent_s=_round(answer.sent - start) or 0.0,
        ttft_s=_round(None if answer.first_text is None else answer.first_text - answer.sent),
        finish_s=_round(None if answer.finish is None else answer.finish - answer.sent),
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        prompt=prompt,
        text_sha256=sha256(said.encode()).hexdigest()[:16] if not answer.error else None,
        error=error,
    )


def repeat_of(answers: Sequence[Answer], prompts: Sequence[str] | None = None) -> Repeat:
    """One pass as a record keeps it. Failed requests are in it, and count for nothing but themselves."""
    start = min((a.sent for a in answers if a.sent), default=0.0)
    names = prompts or [None] * len(answers)
    requests = [request_of(a, start, name) for a, name in zip(answers, names, strict=True)]
    good = [r for r in requests if r.error is None]
    ends = [r.sent_s + (r.finish_s or 0.0) for r in good]
    gaps = Counter(
        float(f"{1000 * (b - a):.3g}") for answer in answers for a, b in pairwise(answer.arrivals)
    )
    return Repeat(
        wall_s=max(ends, default=0.0),
        output_tokens=sum(r.output_tokens or 0 for r in good),
        requests=tuple(requests),
        gaps_ms=tuple(sorted(gaps.items())),
    )


def good_requests(repeats: Sequence[Repeat]) -> list[Request]:
    return [r for repeat in repeats for r in repeat.requests if r.error is None]


def tpot_s(request: Request) -> float | None:
    if request.ttft_s is None or request.finish_s is None or (request.output_tokens or 0) < 2:
        return None
    return (request.finish_s - request.ttft_s) / ((request.output_tokens or 0) - 1)


def seconds(request: Request, metric: str) -> float | None:
    """ttft, tpot or e2e of one request; None where it cannot be known."""
    return {"ttft": request.ttft_s, "tpot": tpot_s(request), "e2e": request.finish_s}[metric]


def e2e_tok_per_s(request: Request) -> float:
    return (request.output_tokens or 0) / request.finish_s if request.finish_s else 0.0


def decode_tok_per_s(request: Request) -> float | None:
    pace = tpot_s(request)
    return 1 / pace if pace else None


def rates(repeats: Sequence[Repeat]) -> list[float]:
    """Output tok/s of every repeat that has a good request."""
    return [r.output_tokens / r.wall_s for r in repeats if r.wall_s > 0]


def latencies_ms(repeats: Sequence[Repeat], metric: str) -> tuple[list[float], list[int] | None]:
    """All values of a metric in milliseconds, and how often each was seen where that is kept as counts."""
    if metric == "itl":
        pairs = [pair for repeat in repeats for pair in repeat.gaps_ms]
        return [gap for gap, _ in pairs], [count for _, count in pairs]
    found = (seconds(request, metric) for request in good_requests(repeats))
    return [1000 * value for value in found if value is not None], None


def percentiles(repeats: Sequence[Repeat]) -> dict[str, Figures]:
    """p50 to p99 in milliseconds by metric; a metric nobody could measure is left out."""
    found = {m: stats.percentiles(*latencies_ms(repeats, m)) for m in METRICS}
    return {metric: values for metric, values in found.items() if values}


def meets(request: Request, targets_ms: Mapping[str, float]) -> bool:
    """Whether a good request is within every target (ttft, tpot, e2e)."""
    return all(
        (value := seconds(request, name)) is not None and 1000 * value <= limit
        for name, limit in targets_ms.items()
    )


def load_figures(
    repeats: Sequence[Repeat],
    targets_ms: Mapping[str, float] | None = None,
    price_per_hour: float | None = None,
) -> Figures:
    """The figures of a closed or open load. Empty when no request was good."""
    speeds = rates(repeats)
    if not speeds:
        return {}
    good = good_requests(repeats)
    prompts = [r.prompt_tokens or 0 for r in good]
    walls = sum(r.wall_s for r in repeats)
    decode = [d for d in map(decode_tok_per_s, good) if d is not None]
    found = {
        "output_tok_per_s": stats.median(speeds),
        "output_tok_per_s_min": min(speeds),
        "output_tok_per_s_max": max(speeds),
        "spread": stats.spread(speeds),
        "total_tok_per_s": (sum(prompts) + sum(r.output_tokens or 0 for r in good)) / walls,
        "requests_per_s": len(good) / walls,
        "requests_good": len(good),
        "requests_failed": sum(len(r.requests) for r in repeats) - len(good),
        "prompt_tokens_min": min(prompts),
        "prompt_tokens_max": max(prompts),
    }
    if decode:
        found["per_stream_tok_per_s"] = stats.median(decode)
    if targets_ms:
        found["goodput_req_per_s"] = sum(meets(r, targets_ms) for r in good) / walls
    if price_per_hour is not None:
        found["cost_per_m_output_tokens"] = (
            price_per_hour / (found["output_tok_per_s"] * 3600) * 1e6
        )
    return found


def one_figures(repeats: Sequence[Repeat]) -> Figures:
    """The figures of `bench one`: geometric means over prompts of the medians of their repeats."""
    by_prompt: dict[str, list[Request]] = {}
    for request in good_requests(repeats):
        by_prompt.setdefault(request.prompt or "", []).append(request)
    if not by_prompt:
        return {}
    groups = list(by_prompt.values())
    speeds = [stats.median([e2e_tok_per_s(r) for r in group]) for group in groups]
    found = {
        "e2e_tok_per_s": stats.geometric_mean(speeds),
        "prompts": len(groups),
        "repeats_identical": sum(identical(group, len(repeats)) for group in groups),
    }
    decode = [[d for d in map(decode_tok_per_s, group) if d] for group in groups]
    if all(decode):
        found["decode_tok_per_s"] = stats.geometric_mean([stats.median(d) for d in decode])
    firsts = [[r.ttft_s for r in group if r.ttft_s is not None] for group in groups]
    if all(firsts):
        found["ttft_ms"] = 1000 * stats.median([stats.median(f) for f in firsts])
    return found


def identical(group: Sequence[Request], repeats: int) -> bool:
    """Whether a prompt gave one text, every time."""
    return len(group) == repeats and len({r.text_sha256 for r in group}) == 1


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
