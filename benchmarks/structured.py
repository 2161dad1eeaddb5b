"""What a grammar costs: 16 rows under a JSON schema against the same rows without, in turns, offline.

    python benchmarks/structured.py [--model demo] [--rows 16] [--tokens 64] [--repeats 5] [--out FILE]

Every row makes the same number of tokens: the schema (a list of 60 small objects) is longer than that, and ends of text
are ignored. One engine in this process; both kinds are run once to warm up, then in turns, which of them first
alternating. Prints tokens a second of each turn, medians, spreads, and the ratio of the medians.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from onechip import LLM, SamplingParams, StructuredOutputsParams

PROMPT_TOKENS = 64
SCHEMA = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


def turn(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Generated tokens a second."""
    started = time.perf_counter()
    done = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    tokens = sum(len(one.token_ids) for one in done)
    assert tokens == len(prompts) * (params.max_tokens or 0), "a row ended early"
    return tokens / seconds


def measure(llm: LLM, rows: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    free = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    bound = replace(free, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    draw = random.Random(0)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for repeat in range(-1, repeats):
        prompts = [[2, *(draw.randrange(1000, 200_000) for _ in range(PROMPT_TOKENS - 1))]] * rows
        prompts = [[*prompt[:-1], 5000 + row] for row, prompt in enumerate(prompts)]
        pair = [("without", free), ("with", bound)]
        for name, params in pair if repeat % 2 else reversed(pair):
            rate = turn(llm, prompts, params)
            if repeat >= 0:
                rates[name].append(rate)
                print(f"  {name:8} {rate:7.1f} tokens/s", flush=True)
    return rates


def report(rates: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(
            f"{name:8} median {medians[name]:.1f} tokens/s, {min(values):.1f} to {max(values):.1f}"
        )
    ratio = medians["with"] / medians["without"]
    print(f"with / without: {ratio:.3f}")
    return {"rates": rates, "medians": medians, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    llm = LLM(
        asked.model, max_seqs=asked.rows, max_model_len=512, random_weights=asked.random_weights
    )
    print(f"{asked.model}: {asked.rows} rows, {PROMPT_TOKENS} tokens in, {asked.tokens} out")
    found = report(measure(llm, asked.rows, asked.tokens, asked.repeats))
    if asked.out is not None:
        asked.out.write_text(json.dumps({**vars(asked), **found}, default=str, indent=1) + "\n")


if __name__ == "__main__":
    main()
