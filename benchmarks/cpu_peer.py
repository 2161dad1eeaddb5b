"""onechip against llama.cpp on the machine at hand: the same GGUF, greedy, over HTTP, in turns.

    python benchmarks/cpu_peer.py [--peers llamacpp,node] [--repeats 5] [--out results/cpu_peer.json]

1. Install what is missing (`--setup` does only that) and start every engine once, one after the other.
2. Make prompts: ordinary English words, tokenised by the peer, cut to length; none is used twice by an engine, so no
   prefix cache helps, and every engine gets the same ones in the same turn.
3. Warm up each engine with one small round.
4. For each repeat, for each cell, for each engine: measure. Only one engine works at a time; one that spins while idle
   is stopped meanwhile. The order of the engines alternates with the repeat.
5. Print medians, spreads and the ratio of medians, and write every measurement to a JSON record.

A cell is a number of concurrent requests (128 tokens in, 64 out, end of text ignored) or one prompt of 512 tokens with
one token out. Tokens are counted from `usage`, never from text. GB/s and GFLOP/s are the least the engine must have
moved and computed: the weights once a decode step, and two operations a weight and token.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import peers
from peers import Engine, Running

CONTEXT = 1024
PROMPT_TOKENS, OUTPUT_TOKENS, LONG_PROMPT = 128, 64, 512
WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were her all she there would their we him been has when who will more no if out so said what up "
    "its about into than them can only other new some could time these two may then do first any my now such like "
    "our over man me even most made after also did many before must through back years where much your way well "
    "down should because each just those people how too little state good very make world still own see men work "
    "long get here between both life being under never day same another know while last might us great old year off "
    "come since against go came right used take three river mountain letter winter garden engine music bridge"
).split()


@dataclass(frozen=True)
class Cell:
    """A load: `concurrency` requests at once, each `prompt` tokens in and `output` tokens out."""

    name: str
    concurrency: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Sample:
    """One measurement of one engine in one cell; times in seconds from the first request's start."""

    engine: str
    cell: str
    repeat: int
    wall: float
    first_token: float
    prompt_tokens: int
    output_tokens: int
    cpu: float
    load: float

    @property
    def rate(self) -> float:
        """The cell's figure: output tokens a second, or prompt tokens a second where nothing else is asked."""
        if self.output_tokens > 1:
            return self.output_tokens / self.wall
        return self.prompt_tokens / self.first_token


async def stream(port: int, body: dict[str, object]) -> tuple[float, int, int]:
    """POST one completion and read it to its end: (time of the first token, prompt tokens, output tokens).

    Plain sockets: a client library costs a tenth of a core at these rates, which the server needs. Servers send whole
    events in a chunk, so a line that starts with "data:" is an event.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(
        f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload
    )
    first, usage, lines = 0.0, {}, []
    async for line in reader:
        lines.append(line)
        if line.startswith(b"data: {"):
            first = first or time.perf_counter()
            if b'"completion_tokens"' in line:
                usage = json.loads(line[6:])["usage"]
    writer.close()
    if not usage:
        sys.exit(f"no usage in the answer of port {port}: {b''.join(lines[-20:])!r}")
    return first, usage["prompt_tokens"], usage["completion_tokens"]


async def burst(
    server: Running, prompts: Sequence[Sequence[int]], output: int
) -> tuple[float, float, int, int]:
    """Send all prompts at once: (wall, median time to first token, prompt tokens, output tokens)."""
    common = {
        "model": "demo",
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.engine.extra_fields,
    }
    begun = time.perf_counter()
    answers = await asyncio.gather(
        *(stream(server.port, {**common, "prompt": list(p)}) for p in prompts)
    )
    wall = time.perf_counter() - begun
    first = statistics.median(answer[0] - begun for answer in answers)
    return wall, first, sum(answer[1] for answer in answers), sum(answer[2] for answer in answers)


def measure(server: Running, cell: Cell, repeat: int, prompts: Sequence[Sequence[int]]) -> Sample:
    server.resume()
    cpu = server.cpu_seconds()
    wall, first, read, written = asyncio.run(burst(server, prompts, cell.output))
    cpu = server.cpu_seconds() - cpu
    server.pause()
    expected = (cell.concurrency * cell.prompt, cell.concurrency * cell.output)
    if (read, written) != expected:
        sys.exit(
            f"{server.engine.name} in {cell.name}: {(read, written)} tokens in and out, not {expected}"
        )
    load = os.getloadavg()[0]
    return Sample(server.engine.name, cell.name, repeat, wall, first, read, written, cpu, load)


class Prompts:
    """Distinct prompts of exact length, from seeded random words and a server's /tokenize route."""

    def __init__(self, server: Running, seed: int):
        self.server, self.random = server, random.Random(seed)

    def draw(self, count: int, length: int) -> list[list[int]]:
        self.server.resume()
        found = [self._one(length) for _ in range(count)]
        self.server.pause()
        return found

    def _one(self, length: int) -> list[int]:
        text = " ".join(self.random.choices(WORDS, k=length))
        body = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}/tokenize", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            ids = json.load(answer)["tokens"]
        assert len(ids) >= length
        return ids[:length]


def cells(concurrency: Iterable[int]) -> list[Cell]:
    loads = [Cell(f"{n} at once", n, PROMPT_TOKENS, OUTPUT_TOKENS) for n in concurrency]
    return [*loads, Cell(f"prompt of {LONG_PROMPT}", 1, LONG_PROMPT, 1)]


def run(
    servers: Sequence[Running], prompts: Prompts, plan: Sequence[Cell], repeats: int
) -> list[Sample]:
    """Warm up, then measure in turns."""
    for server in servers:
        for cell in plan:
            small = Cell("warm-up", cell.concurrency, cell.prompt, min(cell.output, 4))
            measure(server, small, -1, prompts.draw(cell.concurrency, cell.prompt))
    samples: list[Sample] = []
    for repeat in range(repeats):
        for cell in plan:
            texts = prompts.draw(cell.concurrency, cell.prompt)
            for server in servers if repeat % 2 == 0 else reversed(servers):
                samples.append(measure(server, cell, repeat, texts))
                progress = f"{repeat + 1}/{repeats} {cell.name:14} {server.engine.name:18}"
                print(f"  {progress}{samples[-1].rate:9.1f} tokens/s", file=sys.stderr)
    return samples


@dataclass(frozen=True)
class Weights:
    """What one engine must read and compute: bytes a decode step, operations a prompt token and an output token."""

    step_bytes: int
    prompt_flop: int
    output_flop: int

    def traffic(self, sample: Sample, cell: Cell) -> float:
        """GB/s of weights over the whole cell, one read a decode step and one for the prompts."""
        return self.step_bytes * (cell.output if cell.output > 1 else 1) / sample.wall / 1e9

    def compute(self, sample: Sample) -> float:
        work = self.prompt_flop * sample.prompt_tokens + self.output_flop * sample.output_tokens
        return work / sample.wall / 1e9


@dataclass(frozen=True)
class Row:
    """One engine in one cell: medians over the repeats. `spread` is (max - min) / median; `ratio` is onechip's median
    over this engine's, and `ratios` the same repeat by repeat."""

    cell: str
    engine: str
    tokens_per_s: float
    spread: float
    first_token_ms: float
    cpu_s_per_1000_tokens: float
    gb_per_s: float
    gflop_per_s: float
    ratio: float | None
    ratios: tuple[float, ...]


def summarise(
    samples: Sequence[Sample], plan: Sequence[Cell], weights: dict[str, Weights]
) -> list[Row]:
    names = list(dict.fromkeys(sample.engine for sample in samples))
    return [_row(samples, cell, name, weights[name]) for cell in plan for name in names]


def _row(samples: Sequence[Sample], cell: Cell, name: str, weights: Weights) -> Row:
    mine = sorted(
        (s for s in samples if s.cell == cell.name and s.engine == name), key=lambda s: s.repeat
    )
    ours = sorted(
        (s for s in samples if s.cell == cell.name and s.engine == "onechip"),
        key=lambda s: s.repeat,
    )
    rates = [sample.rate for sample in mine]
    middle = statistics.median(rates)
    per_token = [s.cpu / (s.output_tokens if cell.output > 1 else s.prompt_tokens) for s in mine]
    return Row(
        cell=cell.name,
        engine=name,
        tokens_per_s=middle,
        spread=(max(rates) - min(rates)) / middle,
        first_token_ms=1e3 * statistics.median(s.first_token for s in mine),
        cpu_s_per_1000_tokens=1e3 * statistics.median(per_token),
        gb_per_s=statistics.median(weights.traffic(s, cell) for s in mine),
        gflop_per_s=statistics.median(weights.compute(s) for s in mine),
        ratio=statistics.median(s.rate for s in ours) / middle if ours else None,
        ratios=tuple(a.rate / b for a, b in zip(ours, rates, strict=True)) if ours else (),
    )


def table(rows: Sequence[Row]) -> str:
    """The summary as a Markdown table."""
    columns = (
        "load | engine | tokens/s | spread | first token ms | CPU s / 1000 tokens | GB/s | GFLOP/s"
    )
    head = f"| {columns} | onechip / this | by repeat |"
    lines = [head, "|---" * head.count(" | ") + "|---|"]
    for row in rows:
        other = row.ratio is not None and row.engine != "onechip"
        ratio = f"{row.ratio:.2f}" if other else ""
        spread = f"{min(row.ratios):.2f} to {max(row.ratios):.2f}" if other else ""
        lines.append(
            f"| {row.cell} | {row.engine} | {row.tokens_per_s:.1f} | {row.spread:.0%} | {row.first_token_ms:.0f} "
            f"| {row.cpu_s_per_1000_tokens:.1f} | {row.gb_per_s:.2f} | {row.gflop_per_s:.0f} | {ratio} | {spread} |"
        )
    return "\n".join(lines)


def weights_of(model: str, dtype: str) -> tuple[Weights, Weights]:
    """(onechip's, llama.cpp's) work a token: the one holds weights in `dtype`, the other as the file stores them."""
    from onechip.checkpoint.source import open_checkpoint
    from onechip.model.account import account, layer_parameters
    from onechip.model.spec import model_config

    checkpoint = open_checkpoint(model)
    config = model_config(checkpoint.config)
    costs = account(config, "float32" if dtype == "float32" else "bfloat16", "float32")
    body = sum(layer_parameters(config, layer) for layer in config.layers)
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    flop = {"prompt_flop": 2 * body, "output_flop": 2 * costs.matmul_parameters}
    return Weights(costs.streamed + costs.widened, **flop), Weights(stored, **flop)


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="onechip against llama.cpp on one GGUF file")
    parser.add_argument("--setup", action="store_true", help="install the peers and stop")
    parser.add_argument(
        "--peers", default="llamacpp", help="llamacpp, node, or both separated by a comma"
    )
    parser.add_argument("--without-onechip", action="store_true", help="measure the peers alone")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrency", default="1,4,8,16")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of onechip"
    )
    parser.add_argument("--flags", default="", help="more flags for onechip serve, one string")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "onechip" / "peers")
    parser.add_argument("--out", type=Path, default=Path("results/cpu_peer.json"))
    return parser.parse_args()


def engines(options: argparse.Namespace, gguf: Path, slots: int) -> list[Engine]:
    wanted = options.peers.split(",")
    sizes = {"slots": slots, "context": CONTEXT}
    flags = ("--dtype", options.dtype, *options.flags.split())
    found = (
        []
        if options.without_onechip
        else [peers.onechip(slots=slots, context=CONTEXT, flags=flags)]
    )
    if "llamacpp" in wanted:
        peers.set_up_llamacpp(options.cache)
        found.append(peers.llamacpp(gguf, options.cache, threads=options.threads, **sizes))
    if "node" in wanted:
        peers.set_up_node(options.cache)
        found.append(peers.llamacpp_node(gguf, options.cache, threads=options.threads, **sizes))
    return found


def main() -> None:
    from onechip.checkpoint.source import assemble_demo, default_cache_dir

    options = parse()
    # A terminated benchmark still ends its servers: the exit unwinds the stack below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gguf = assemble_demo(default_cache_dir())
    plan = cells(int(n) for n in options.concurrency.split(","))
    chosen = engines(options, gguf, max(cell.concurrency for cell in plan))
    if options.setup:
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        servers: list[Running] = []
        for engine in chosen:
            log = options.out.with_name(f"{options.out.stem}.{len(servers)}.log")
            servers.append(stack.enter_context(peers.started(engine, log, options.threads)))
            print(f"{engine.name}: up after {servers[-1].startup_s:.1f} s", file=sys.stderr)
            servers[-1].pause()
        tokenizer = next(
            server for server in reversed(servers) if server.engine.name != "llama.cpp (node)"
        )
        samples = run(servers, Prompts(tokenizer, options.seed), plan, options.repeats)
    ours, theirs = weights_of("demo", options.dtype)
    weights = {engine.name: ours if engine.name == "onechip" else theirs for engine in chosen}
    rows = summarise(samples, plan, weights)
    record = {
        "machine": machine(),
        "options": {key: str(value) for key, value in vars(options).items()},
        "engines": [asdict(s.engine) | {"startup_s": s.startup_s} for s in servers],
        "summary": [asdict(row) for row in rows],
        "samples": [asdict(sample) for sample in samples],
    }
    options.out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
