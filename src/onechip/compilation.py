"""`onechip compile`: every program of an engine, compiled for a chip that need not be here, and what that tells.

1. The design (bucket table, memory plan, shapes) is made for the target's memory, as serving there would make it.
2. Every program is traced, lowered and compiled, what is needed first before the others, a few at a time; each leaves a
   `ProgramRecord`.
3. The plan is checked against the compiled programs' own memory analysis: does it fit, and how many tokens would.
4. `--out` saves the record, and for each program its executable, which `serve --programs` loads.

Owns the record and its wording; the numbers come from `engine`, `model.account` and the compilers.
"""

import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from onechip import __version__, printing
from onechip.checkpoint.source import is_bare, open_checkpoint
from onechip.config import EngineConfig, ModelConfig
from onechip.engine import hlo, saved
from onechip.engine.buckets import Bucket
from onechip.engine.design import Design, Hardware, design
from onechip.engine.memory import device_memory
from onechip.engine.programs import (
    COMPILERS,
    Needs,
    Program,
    Shapes,
    name_of,
    needed,
    trace,
    trace_layers,
)
from onechip.engine.target import Target, describe
from onechip.errors import DoesNotFit
from onechip.model import account
from onechip.model.spec import model_config

CONTEXT = 1024  # keys a row sees in `least_bytes`, unless told otherwise


@dataclass(frozen=True)
class ProgramRecord:
    """One program. Times in seconds, sizes in bytes.

    `matmul_flops` are counted in the traced program (`engine.hlo`); `compiler_flops` are the compiler's own (it
    does not see into kernels). `layer_flops` are the part of the layers, `full_layer_flops` what it would be were every
    layer run for every token: a prompt leaves early (`model.gemma`). `least_bytes` is what a launch must read whatever
    the implementation: streamed weights, table rows and visible K/V, `least_s` the time that takes at the chip's
    bandwidth, or the matmuls at its peak if that is longer. `launches` counts the instructions run one by one. `moves`
    are copies, converts, transposes and concatenations as large as a K/V pool or an embedding table: there should be
    none.
    """

    name: str
    tokens: int
    rows: int
    trace_s: float
    lower_s: float
    compile_s: float
    argument_bytes: int
    temporary_bytes: int
    alias_bytes: int
    code_bytes: int
    matmul_flops: int
    layer_flops: int
    full_layer_flops: int
    compiler_flops: int
    least_bytes: int
    least_s: float | None
    launches: int
    moves: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """A whole compile. `wall_s` is from the first trace to the last executable, on `compilers` threads.

    `tokens_that_fit` is what the full pool could hold with the measured programs; `kv_tokens` what the plan gave it.
    """

    schema_version: int
    model: str
    target: str
    attention: str
    versions: dict[str, str]
    settings: dict[str, Any]
    context: int
    programs: tuple[ProgramRecord, ...]
    wall_s: float
    compilers: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    needs: dict[str, int]
    memory: int
    kv_tokens: int
    tokens_that_fit: int
    fits: bool


def compile_for(
    model: str,
    target: str,
    config: EngineConfig,
    *,
    out: Path | None = None,
    context: int = CONTEXT,
    progress: Callable[[int, int, str], None] | None = None,
) -> Record:
    """Compile every program of `model` for `target`. Raises StartupError: DoesNotFit before a compiler is started."""
    checkpoint = open_checkpoint(model, random_weights=is_bare(model) or config.random_weights)
    spec = model_config(checkpoint.config)
    described = describe(target)
    memory = device_memory(described.device) if described.chip is None else described.chip.memory
    hardware = Hardware(described.platform, memory, 9.0 if target == "cuda-h200" else None)
    wanted = design(spec, config, hardware)
    started = time.monotonic()
    with saved.no_cache():
        compiled = _compile_all(wanted, described, progress)
    wall = time.monotonic() - started
    measure = _Measure(spec, wanted, described, context)
    record = _record(checkpoint.source, measure, config, hardware, compiled, wall)
    if out is not None:
        saved.save(
            {p: c.executable for p, c in compiled.items()}, wanted.shapes, described.device, out
        )
        (out / "record.json").write_text(json.dumps(asdict(record), indent=1))
    return record


@dataclass(frozen=True)
class _Compiled:
    jaxpr: Any
    executable: Any
    seconds: tuple[float, float, float]


def _compilers(target: Target) -> int:
    """Programs compiled side by side. libtpu keeps two cores busy with one: two of them there would only take turns."""
    cores = os.cpu_count() or 1
    return min(COMPILERS, max(1, cores // 2)) if target.platform == "tpu" else COMPILERS


def _compile_all(
    wanted: Design, target: Target, progress: Callable[[int, int, str], None] | None
) -> dict[Program, _Compiled]:
    programs = needed(wanted.table)
    with ThreadPoolExecutor(1) as lowering, ThreadPoolExecutor(_compilers(target)) as compiling:
        # Python traces one program while the compilers, which do not need it, work on others.
        lowered = [lowering.submit(_lower, wanted.shapes, p, target) for p in programs]
        coming = [compiling.submit(_compile, future, target) for future in lowered]
        compiled: dict[Program, _Compiled] = {}
        for number, (program, future) in enumerate(zip(programs, coming, strict=True)):
            if progress is not None:
                progress(number, len(programs), name_of(program))
            compiled[program] = future.result()
    if progress is not None:
        progress(len(programs), len(programs), "")
    return compiled


def _lower(shapes: Shapes, program: Program, target: Target) -> tuple[Any, Any, float, float]:
    """(jaxpr, what to compile, seconds of tracing, of lowering)."""
    start = time.monotonic()
    with target.lowering():
        traced = trace(shapes, program, target.sharding)
        middle = time.monotonic()
        lowered = traced.lower()
    return traced.jaxpr, lowered, middle - start, time.monotonic() - middle


def _compile(coming: Future[tuple[Any, Any, float, float]], target: Target) -> _Compiled:
    jaxpr, lowered, trace_s, lower_s = coming.result()
    start = time.monotonic()
    executable = lowered.compile(compiler_options=dict(target.options or {}))
    return _Compiled(jaxpr, executable, (trace_s, lower_s, time.monotonic() - start))


@dataclass(frozen=True)
class _Measure:
    """What a program's record needs beside the program."""

    spec: ModelConfig
    design: Design
    target: Target
    context: int

    def record(self, program: Program, compiled: _Compiled) -> ProgramRecord:
        memory = compiled.executable.memory_analysis()
        text = compiled.executable.as_text()
        flops = hlo.matmul_flops(compiled.jaxpr)
        layers, full = self.layer_flops(program)
        least = self.least_bytes(program)
        trace_s, lower_s, compile_s = compiled.seconds
        return ProgramRecord(
            name=name_of(program),
            tokens=program.tokens if isinstance(program, Bucket) else 0,
            rows=program.rows if isinstance(program, Bucket) else 0,
            trace_s=trace_s,
            lower_s=lower_s,
            compile_s=compile_s,
            argument_bytes=memory.argument_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            matmul_flops=flops,
            layer_flops=layers,
            full_layer_flops=full,
            compiler_flops=int((compiled.executable.cost_analysis() or {}).get("flops", 0)),
            least_bytes=least,
            least_s=self.least_seconds(least, flops),
            launches=hlo.launches(text),
            moves=tuple(self.moves(text)),
        )

    def layer_flops(self, program: Program) -> tuple[int, int]:
        """(of the layers as they run, were each run for every token): only prompts that are not scored leave early."""
        if not isinstance(program, Bucket):
            return 0, 0

        def count(every_position: bool) -> int:
            with self.target.lowering():
                traced = trace_layers(self.design.shapes, program, every_position)
            return hlo.matmul_flops(traced.jaxpr)

        full = count(every_position=True)
        return (full if program.decode or program.score else count(every_position=False)), full

    def least_bytes(self, program: Program) -> int:
        """Streamed weights once, one table row a token, and the keys that each row sees."""
        if not isinstance(program, Bucket):
            return 0
        costs = account.account(self.spec, self.design.dtype, self.design.kv_dtype)
        window = min(self.context, self.spec.window or 0)
        share = window / self.spec.window if self.spec.window else 0.0
        seen = int(self.context * costs.kv_token + share * costs.kv_window)
        tables = program.tokens * costs.gathered
        return costs.streamed + costs.widened + tables + program.rows * seen

    def least_seconds(self, least_bytes: int, flops: int) -> float | None:
        chip = self.target.chip
        if chip is None:
            return None
        return max(least_bytes / chip.bandwidth, flops / chip.flops)

    def moves(self, text: str) -> list[str]:
        """Rewrites as large as the smaller of a full-attention pool and the embedding table, or of a pool's shape."""
        shapes = self.design.shapes
        item = account.ITEM_BYTES[self.design.dtype]
        table = self.spec.vocab_size * self.spec.hidden_size * item
        smallest, pools = table, set[tuple[int, ...]]()
        for layer in self.spec.owners:
            one = (layer.kv_heads, shapes.pages[layer.kind], shapes.page_size, layer.head_dim)
            if layer.kind == "full":
                smallest = min(smallest, math.prod(one) * item)
            pools.add(one)
        pools.update(kv.k.shape for kv in shapes.caches(jax.ShapeDtypeStruct))
        return hlo.large_moves(text, smallest, tuple(pools))


def _record(
    model: str,
    measure: _Measure,
    config: EngineConfig,
    hardware: Hardware,
    compiled: dict[Program, _Compiled],
    wall: float,
) -> Record:
    programs = tuple(measure.record(program, one) for program, one in compiled.items())
    needs = Needs(max(p.temporary_bytes for p in programs), sum(p.code_bytes for p in programs))
    wanted = measure.design
    plan = replace(wanted.plan, needs=needs)
    return Record(
        schema_version=1,
        model=model,
        target=measure.target.name,
        attention=wanted.shapes.attention,
        versions={"onechip": __version__, "jax": jax.__version__, "compiler": _compiler(measure)},
        settings={
            "dtype": wanted.dtype,
            "kv_dtype": wanted.kv_dtype,
            "max_seqs": config.max_seqs,
            "max_model_len": wanted.max_model_len,
            "page_size": wanted.shapes.page_size,
            "chunk_size": wanted.table.chunk,
            "decode_steps": wanted.shapes.steps,
            "scan_layers": wanted.shapes.config.scan_layers,
            "experts": wanted.shapes.experts if measure.spec.moe is not None else None,
        },
        context=measure.context,
        programs=programs,
        wall_s=wall,
        compilers=_compilers(measure.target),
        weight_bytes=plan.weight_bytes,
        kv_bytes=plan.kv_bytes,
        state_bytes=plan.state_bytes,
        needs=asdict(needs),
        memory=plan.memory,
        kv_tokens=plan.kv_tokens,
        tokens_that_fit=_tokens_that_fit(measure.spec, config, hardware, needs),
        fits=plan.spare >= 0,
    )


def _compiler(measure: _Measure) -> str:
    return str(measure.target.device.client.platform_version).splitlines()[0]


def _tokens_that_fit(
    spec: ModelConfig, config: EngineConfig, hardware: Hardware, needs: Needs
) -> int:
    """Tokens of context beside the measured programs, were there sequences enough to use them; 0 if none."""
    limit = replace(config, kv_tokens=None, max_model_len=spec.max_positions)
    try:
        by_memory = design(spec, limit, hardware, needs).plan
    except DoesNotFit:
        return 0
    return by_memory.kv_tokens


def show(record: Record, console: Console | None = None) -> None:
    """Print the record as tables. Where output is no terminal, lines are not cut at 80 columns."""
    console = printing.console(console, least=150)
    settings = ", ".join(f"{name} {value}" for name, value in record.settings.items())
    console.print(
        f"[bold]{record.model}[/bold] for {record.target}: {settings}, attention {record.attention}"
    )
    console.print(_program_table(record))
    for program in record.programs:
        for first in program.moves[:1]:
            more = f" and {len(program.moves) - 1} more" if len(program.moves) > 1 else ""
            console.print(f"{program.name} rewrites a large array{more}: {first}", markup=False)
    console.print(
        f"{len(record.programs)} programs in {record.wall_s:.0f} s by {record.compilers} at a time"
    )
    console.print(_memory_table(record))


def _program_table(record: Record) -> Table:
    columns = (
        "<program", "trace s", "compile s", "temporaries MB", "code MB", "matmul GFLOP",
        "of all layers", "least MB", "least ms", "launches", "large moves",
    )  # fmt: skip
    table = printing.table("Programs", columns)
    for p in record.programs:
        table.add_row(
            p.name, f"{p.trace_s + p.lower_s:.1f}", f"{p.compile_s:.1f}",
            f"{p.temporary_bytes / 1e6:.1f}", f"{p.code_bytes / 1e6:.1f}",
            f"{p.matmul_flops / 1e9:.1f}", _share(p), f"{p.least_bytes / 1e6:,.0f}",
            "-" if p.least_s is None else f"{1e3 * p.least_s:.2f}", str(p.launches), str(len(p.moves)),
        )  # fmt: skip
    return table


def _share(program: ProgramRecord) -> str:
    """How much of the layers' matmuls a prompt's early exit leaves."""
    full = program.full_layer_flops
    return f"{program.layer_flops / full:.2f}x" if program.layer_flops < full else "-"


def _memory_table(record: Record) -> Table:
    table = printing.table("Memory", ("<what", "GB", "<"))
    rows = (
        ("device", record.memory, ""),
        ("weights", record.weight_bytes, ""),
        ("K/V pages", record.kv_bytes, f"{record.kv_tokens:,} tokens and the windows"),
        ("slots", record.state_bytes, "last tokens, penalties, masks"),
        ("temporaries", record.needs["temporaries"], "of the largest program"),
        ("code", record.needs["code"], "of all programs"),
    )
    for what, size, note in rows:
        table.add_row(what, f"{size / 1e9:.3f}", note)
    planned = sum(size for _, size, _ in rows[1:])
    verdict = "fits" if record.fits else "does not fit"
    note = f"{verdict}; {record.tokens_that_fit:,} tokens would at {record.settings['max_seqs']} sequences"
    table.add_row("left", f"{(record.memory - planned) / 1e9:.3f}", note)
    return table
