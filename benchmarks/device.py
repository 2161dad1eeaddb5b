"""The engine on a real accelerator, with random weights of a real size: how far from the chip's roof is it?

    python benchmarks/device.py [--config DIR] [--out results/device_<chip>.json] [--without-peer]

1. Build the engine as `serve` does (random weights, every program compiled) and say how long that took.
2. Decode: 1, 8 and 64 rows at contexts of 512 and 8,192 keys. The K/V is zeros put there without a prefill: what it
   holds changes no time. Launches are timed back to back, the first ones left out.
3. Prefill: a lone prompt of 512 and of 4,096 tokens, to its first token, five times.
4. The same decode and prefill with Hugging Face transformers (static cache, compiled), where torch sees a GPU.

GB/s are the bytes a step cannot do without (streamed weights, table rows, visible K/V) over its time, FLOP/s the
matmuls of the traced program; the roof is the chip's bandwidth or bf16 peak in `onechip.model.account`. Host time is
what the loop spends a launch beside waiting for the device. Nothing was measured with it that is not in results/.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from onechip import __version__
from onechip.config import EngineConfig, ModelConfig
from onechip.engine import hlo
from onechip.engine.build import build_engine
from onechip.engine.loop import Engine, run_until_idle
from onechip.engine.programs import trace
from onechip.engine.runner import DeviceRunner
from onechip.engine.sequence import Sequence
from onechip.model import account
from onechip.request import Request, SamplingParams

CONFIG = Path(__file__).parents[1] / "tests" / "data" / "configs" / "gemma-4-E2B"
ROWS, CONTEXTS, PROMPTS = (1, 8, 64), (512, 8192), (512, 4096)
TOKENS = 64  # timed decode steps of a cell
WARM = 8  # launches left out first
REPEATS = 5
KINDS = {  # jax's device_kind -> the chip's name in `account.CHIPS`
    "TPU v5 lite": "tpu-v5e-1", "TPU v5e": "tpu-v5e-1", "TPU v6 lite": "tpu-v6e-1",
    "TPU v6e": "tpu-v6e-1", "NVIDIA H200": "cuda-h200", "NVIDIA L4": "cuda-l4",
    "NVIDIA H100 80GB HBM3": "cuda-h100",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measurement. `step_ms` is a decode step's time, or a prompt's to its first token; `host_ms` the loop's own a
    launch. `bytes` and `flops` are the least for that step.
    """

    engine: str
    phase: str
    rows: int
    tokens: int
    tokens_per_s: float
    step_ms: float
    host_ms: float | None
    bytes: int
    flops: int
    bandwidth_share: float | None
    compute_share: float | None


@dataclass(frozen=True)
class Bench:
    engine: Engine
    runner: DeviceRunner
    chip: account.Chip | None

    @property
    def spec(self) -> ModelConfig:
        return self.runner.shapes.config

    def cell(
        self, phase: str, rows: int, tokens: int, made: int, step_s: float, **facts: Any
    ) -> Cell:
        least, flops = facts["least"], facts["flops"]
        return Cell(
            engine=facts.get("engine", "onechip"),
            phase=phase,
            rows=rows,
            tokens=tokens,
            tokens_per_s=made / step_s,
            step_ms=1e3 * step_s,
            host_ms=facts.get("host_ms"),
            bytes=least,
            flops=flops,
            bandwidth_share=self.chip and least / step_s / self.chip.bandwidth,
            compute_share=self.chip and flops / step_s / self.chip.flops,
        )

    def least(self, rows: int, context: int, tokens: int) -> int:
        costs = account.account(self.spec, self.runner.shapes.dtype, self.runner.shapes.kv_dtype)
        window = self.spec.window or 1
        seen = context * costs.kv_token + min(context, window) * costs.kv_window // window
        return costs.streamed + costs.widened + tokens * costs.gathered + rows * seen

    def flops(self, tokens: int, rows: int, singles: bool) -> int:
        bucket = self.runner.whole.pick(tokens, rows, singles, False)
        shapes = replace(self.runner.shapes, steps=1)
        return hlo.matmul_flops(trace(shapes, bucket, self.runner.programs.sharding).jaxpr)


def decode(bench: Bench, rows: int, context: int) -> Cell:
    """Rows whose first `context` tokens count as computed make TOKENS tokens each."""
    engine = bench.engine
    total = TOKENS + WARM * engine.pace.most + 2
    for index in range(rows):
        sampling = SamplingParams(max_tokens=total, temperature=0.0, seed=0)
        adopt(engine, Request(f"row-{index}", (7 + index,) * context, sampling))
    waits: list[float] = []
    with timed_waits(bench.runner, waits):
        while engine.steps and engine.generated_tokens < rows * (1 + WARM):
            engine.step()
        waits.clear()
        launches, made, started = engine.steps, engine.generated_tokens, time.perf_counter()
        while engine.generated_tokens - made < rows * TOKENS and engine.has_work:
            engine.step()
        seconds = time.perf_counter() - started
        launches, made = engine.steps - launches, engine.generated_tokens - made
    for index in range(rows):
        engine.abort(f"row-{index}")
    run_until_idle(engine)
    step_s = seconds * rows / made
    host = 1e3 * (seconds - sum(waits)) / max(launches, 1)
    return bench.cell(
        "decode", rows, context, rows, step_s,
        least=bench.least(rows, context, rows), flops=bench.flops(rows, rows, True), host_ms=host,
    )  # fmt: skip


def adopt(engine: Engine, request: Request) -> None:
    """Put a sequence among the running ones as if its prompt but the last token had been computed."""
    scheduler, pages = engine.scheduler, engine.scheduler.pages
    sequence = Sequence(request, list(request.prompt_ids))
    sequence.computed = sequence.prompt_len - 1
    sequence.slot = scheduler.free_slots.pop()
    if not pages.grow(request.id, sequence.computed, sequence.prompt_len):
        raise SystemExit(f"no K/V pages are left for {request.id}: give fewer rows or contexts")
    engine.sequences[request.id] = sequence
    scheduler.running.append(sequence)
    engine.steps += 1


class timed_waits:  # noqa: N801
    """While open, `waits` collects the seconds that `collect` waits for the device."""

    def __init__(self, runner: DeviceRunner, waits: list[float]):
        self.runner, self.waits, self.collect = runner, waits, runner.collect

    def __enter__(self) -> None:
        def collect(pending: Any) -> Any:
            started = time.perf_counter()
            jax.block_until_ready(pending.out.token)
            self.waits.append(time.perf_counter() - started)
            return self.collect(pending)

        self.runner.collect = collect  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self.runner.collect = self.collect  # type: ignore[method-assign]


def prefill(bench: Bench, tokens: int) -> Cell:
    seconds: list[float] = []
    for repeat in range(REPEATS + 1):
        ids = tuple((11 * i + repeat) % 1000 + 5 for i in range(tokens))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
        started = time.perf_counter()
        bench.engine.submit(Request(f"prompt-{repeat}", ids, sampling))
        run_until_idle(bench.engine)
        seconds.append(time.perf_counter() - started)
    step_s = statistics.median(seconds[1:])
    chunk = bench.runner.whole.chunk
    flops = sum(
        bench.flops(min(chunk, tokens - start), 1, False) for start in range(0, tokens, chunk)
    )
    return bench.cell(
        "prefill", 1, tokens, tokens, step_s, least=bench.least(1, tokens, tokens), flops=flops
    )


def peer_cells(bench: Bench, folder: Path, cells: list[Cell]) -> Iterator[Cell]:
    """The same cells with transformers, one per cell of ours; nothing, with a word on stderr, where it cannot run."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
    except ImportError as error:
        print(f"transformers is left out: {error}", file=sys.stderr)
        return
    if not torch.cuda.is_available():
        print("transformers is left out: torch sees no GPU", file=sys.stderr)
        return
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "text_config", config)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    for cell in cells:
        length = cell.tokens + TOKENS + WARM
        cache = StaticCache(config=config, max_batch_size=cell.rows, max_cache_len=length)
        width = 1 if cell.phase == "decode" else cell.tokens
        ids = torch.full((cell.rows, width), 7, device="cuda")
        first = cell.tokens - 1 if cell.phase == "decode" else 0
        seconds: list[float] = []
        with torch.no_grad():
            for step in range(WARM + (TOKENS if cell.phase == "decode" else REPEATS)):
                at = first + (step if cell.phase == "decode" else 0)
                position = torch.arange(at, at + width, device="cuda")
                torch.cuda.synchronize()
                started = time.perf_counter()
                out = forward(
                    input_ids=ids, past_key_values=cache, cache_position=position,
                    position_ids=position[None].expand(cell.rows, -1), logits_to_keep=1,
                )  # fmt: skip
                out.logits[:, -1].argmax(-1)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
        step_s = statistics.median(seconds[WARM:])
        made = cell.rows if cell.phase == "decode" else cell.tokens
        yield bench.cell(
            cell.phase, cell.rows, cell.tokens, made, step_s,
            least=cell.bytes, flops=cell.flops, engine="transformers",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="a folder with config.json")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    parser.add_argument("--scan-layers", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--without-peer", action="store_true")
    given = parser.parse_args()
    longest = max(*given.contexts, *given.prompts) + TOKENS + 8 * WARM + 8
    started = time.perf_counter()
    wanted = EngineConfig(
        max_seqs=max(given.rows),
        max_model_len=longest,
        random_weights=True,
        scan_layers=given.scan_layers,
    )
    engine = build_engine(str(given.config), wanted)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    runner.programs.wait(runner.programs.wanted)
    engine.step()  # take up the programs that came last
    start_s = time.perf_counter() - started
    kind = engine.info.device
    chip = account.CHIPS[KINDS[kind]] if kind in KINDS else None
    bench = Bench(engine, runner, chip)
    print(
        f"{given.config.name}, random {engine.info.dtype} weights, on {kind}; start {start_s:.0f} s"
    )
    cells: list[Cell] = []
    print(HEAD)
    loads = [(rows, context) for context in given.contexts for rows in given.rows]
    cells.extend(show(decode(bench, rows, context)) for rows, context in loads)
    cells.extend(show(prefill(bench, tokens)) for tokens in given.prompts)
    if not given.without_peer:
        cells += [show(cell) for cell in peer_cells(bench, given.config, list(cells))]
    if given.out is not None:
        record = {
            "schema_version": 1, "date": time.strftime("%Y-%m-%d"), "device": kind,
            "versions": {"onechip": __version__, "jax": jax.__version__, "python": platform.python_version()},
            "model": given.config.name, "dtype": engine.info.dtype, "attention": runner.shapes.attention,
            "scan_layers": runner.shapes.config.scan_layers,
            "start_s": start_s, "command": sys.argv, "cells": [asdict(cell) for cell in cells],
        }  # fmt: skip
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=1))


HEAD = (
    f"{'engine':<13}{'phase':<9}{'rows':>5}{'tokens':>8}{'tokens/s':>11}{'ms':>9}{'host ms':>9}"
    f"{'GB/s':>8}{'TFLOP/s':>9}{'bandwidth':>11}{'compute':>9}"
)


def show(cell: Cell) -> Cell:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    host = "-" if cell.host_ms is None else f"{cell.host_ms:.2f}"
    seconds = cell.step_ms / 1e3
    print(
        f"{cell.engine:<13}{cell.phase:<9}{cell.rows:>5}{cell.tokens:>8}{cell.tokens_per_s:>11,.1f}"
        f"{cell.step_ms:>9.2f}{host:>9}{cell.bytes / seconds / 1e9:>8.1f}"
        f"{cell.flops / seconds / 1e12:>9.2f}{share(cell.bandwidth_share):>11}{share(cell.compute_share):>9}",
        flush=True,
    )
    return cell


if __name__ == "__main__":
    main()
