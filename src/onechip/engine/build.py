"""From a model string to a ready engine: config, memory plan, weights, programs, one token generated.

The order is the order of what can fail cheaply: what the config says and whether it fits is known before a weight is
read, and nothing is called ready before it has produced a token.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import jax

from onechip.cache.pages import PageTable, peak_pages
from onechip.chat.vocabulary import read_vocabulary
from onechip.checkpoint.base import Checkpoint
from onechip.checkpoint.source import default_cache_dir, open_checkpoint
from onechip.config import DTypeName, EngineConfig, ModelConfig
from onechip.engine.buckets import BucketTable, bucket_table, page_size_for
from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.engine.loop import Engine, run_until_idle
from onechip.engine.memory import MemoryPlan, device_memory, plan_memory
from onechip.engine.pace import Pace
from onechip.engine.programs import Shapes
from onechip.engine.progress import Reporter
from onechip.engine.runner import DeviceRunner
from onechip.engine.scheduler import Scheduler
from onechip.errors import ConfigError
from onechip.kernels import attention
from onechip.model.load import load_params, param_bytes, random_params, shapes_of
from onechip.model.params import check_tensors
from onechip.model.spec import model_config
from onechip.request import EngineInfo, Request, SamplingParams

log = logging.getLogger("onechip.engine")

LAUNCH_STEPS = 8  # most decode steps of one launch on an accelerator
DEFAULT_MODEL_LEN = 8192  # tables and logs say so; longer contexts are one flag away


@dataclass(frozen=True)
class Choices:
    """What `auto` and None in an EngineConfig came to, given the model and the device."""

    dtype: DTypeName
    kv_dtype: DTypeName
    max_model_len: int
    table: BucketTable
    steps: int
    page_size: int
    attention: str


def build_engine(model: str, config: EngineConfig, report: Reporter | None = None) -> Engine:
    """A ready engine for `model`. Raises StartupError, each kind with one clear message."""
    checkpoint = open_checkpoint(model, random_weights=config.random_weights)
    return build_from(checkpoint, model_config(checkpoint.config), config, report or Reporter())


def build_from(
    checkpoint: Checkpoint, spec: ModelConfig, config: EngineConfig, report: Reporter
) -> Engine:
    """The same for an opened checkpoint."""
    device = jax.local_devices()[0]
    _enable_compile_cache(config)
    choices = choose(spec, config, device)
    config = replace(config, page_size=choices.page_size)
    plan = _plan(spec, config, choices, device)
    if not config.random_weights:
        check_tensors(spec, shapes_of(checkpoint), checkpoint.source)
    log.info("%s", _summary(checkpoint, spec, choices, plan, device))
    pages = PageTable(choices.page_size, plan.shapes)
    started = time.monotonic()
    params = _load(checkpoint, spec, config, choices.dtype, device, report)
    loaded = time.monotonic()
    log.info("weights loaded in %.1f s", loaded - started)
    runner = DeviceRunner(_shapes(spec, config, choices), choices.table, params, pages, device)
    if config.precompile:
        _compile(runner, report)
    compiled = time.monotonic()
    info = EngineInfo(
        vocab_size=spec.vocab_size,
        max_model_len=choices.max_model_len,
        max_seqs=config.max_seqs,
        kv_tokens=plan.kv_tokens,
        device=device.device_kind,
        dtype=choices.dtype,
        load_seconds=loaded - started,
        compile_seconds=compiled - loaded,
        first_token_seconds=0.0,
        page_size=choices.page_size,
    )
    scheduler = Scheduler(pages, config.max_seqs, choices.table.chunk, choices.table.token_budget)
    vocabulary = partial(read_vocabulary, checkpoint, default_cache_dir())
    grammars = GrammarCompiler(vocabulary, spec.vocab_size, spec.eos_ids)
    make = partial(Engine, runner, scheduler, max_waiting=config.max_waiting, grammars=grammars)
    if not config.precompile:
        return make(info, pace=Pace(choices.steps))
    return _warm(make, info, choices.steps)


def choose(spec: ModelConfig, config: EngineConfig, device: Any) -> Choices:
    """Resolve every `auto`. Raises ConfigError for flags that do not fit the model."""
    length = config.max_model_len or min(spec.max_positions, DEFAULT_MODEL_LEN)
    if not 2 <= length <= spec.max_positions:
        raise ConfigError(
            f"max_model_len is {length}; the model's positions allow 2 to {spec.max_positions}"
        )
    dtype = preferred_dtype(device) if config.dtype == "auto" else config.dtype
    table = bucket_table(config.max_seqs, config.chunk_size, device.platform)
    # A launch costs the host a few ms, little beside a CPU's step and much beside an accelerator's.
    steps = config.decode_steps or (1 if device.platform == "cpu" else LAUNCH_STEPS)
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    page = page_size_for(device.platform) if config.page_size is None else config.page_size
    chosen = attention_for(spec, config.attention, device, page, kv_dtype)
    return Choices(dtype, kv_dtype, length, table, steps, page, chosen)


def attention_for(
    spec: ModelConfig, name: str, device: Any, page_size: int, kv_dtype: DTypeName
) -> str:
    """The attention implementation of a model on a device. Raises ConfigError for one that cannot run there."""
    capability = getattr(device, "compute_capability", None)
    return attention.choose(
        name,
        device.platform,
        page_size=page_size,
        head_dims=[layer.head_dim for layer in spec.owners],
        kv_dtype=kv_dtype,
        capability=None if capability is None else float(capability),
    )


def preferred_dtype(device: Any) -> DTypeName:
    """bfloat16, but float16 on a GPU that has no bfloat16 (before compute capability 8.0; override with --dtype)."""
    capability = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and capability is not None and float(capability) < 8.0:
        return "float16"
    return "bfloat16"


def _plan(spec: ModelConfig, config: EngineConfig, choices: Choices, device: Any) -> MemoryPlan:
    return plan_memory(
        spec,
        config,
        max_model_len=choices.max_model_len,
        chunk=choices.table.chunk,
        weight_bytes=param_bytes(spec, choices.dtype),
        kv_bytes_per_value=4 if choices.kv_dtype == "float32" else 2,
        memory=device_memory(device),
    )


def _shapes(spec: ModelConfig, config: EngineConfig, choices: Choices) -> Shapes:
    page, length, chunk = choices.page_size, choices.max_model_len, choices.table.chunk
    return Shapes(
        config=spec,
        dtype=choices.dtype,
        kv_dtype=choices.kv_dtype,
        page_size=page,
        max_seqs=config.max_seqs,
        full_columns=-(-length // page),
        sliding_columns=peak_pages(length, max(chunk, choices.steps), spec.window, page),
        attention=choices.attention,
        steps=choices.steps,
    )


def _load(
    checkpoint: Checkpoint,
    spec: ModelConfig,
    config: EngineConfig,
    dtype: DTypeName,
    device: Any,
    report: Reporter,
) -> Any:
    if config.random_weights:
        return random_params(spec, dtype, device, config.seed, report.loading)
    return load_params(checkpoint, spec, dtype, device, report.loading)


def _compile(runner: DeviceRunner, report: Reporter) -> None:
    started, compiled, cached = time.monotonic(), compile_count(), cache_hits()
    total, done = len(runner.programs.needed(runner.table)), count()

    def progress(what: str) -> None:
        if report.compiling is not None:
            report.compiling(next(done), total, what)

    runner.programs.compile(runner.table, progress)
    if report.compiling is not None:
        report.compiling(total, total, "")
    cached, compiled = cache_hits() - cached, compile_count() - compiled
    seconds = time.monotonic() - started
    log.info("%d programs in %.1f s, %d of them from the compile cache", compiled, seconds, cached)


def _warm(make: Callable[..., Engine], info: EngineInfo, steps: int) -> Engine:
    """Generate one token through the whole path; compiles are counted from here on."""
    engine = make(info)
    started = time.monotonic()
    sampling = SamplingParams(max_tokens=2, temperature=0.0, seed=0)
    engine.submit(Request("warm-up", (0,), sampling))
    run_until_idle(engine)
    ready = replace(info, first_token_seconds=time.monotonic() - started)
    log.info("first token after %.2f s", ready.first_token_seconds)
    before = compile_count()
    return make(ready, pace=Pace(steps), compiles=lambda: compile_count() - before)


def _enable_compile_cache(config: EngineConfig) -> None:
    """jax's persistent cache: its keys hold program, versions, device and flags already."""
    if config.compile_cache == "off":
        return
    folder = Path(config.compile_cache) if config.compile_cache else default_cache_dir() / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _summary(
    checkpoint: Checkpoint, spec: ModelConfig, choices: Choices, plan: MemoryPlan, device: Any
) -> str:
    return (
        f"{checkpoint.source}: {spec.family}, {len(spec.layers)} layers, {choices.dtype} weights "
        f"{plan.weight_bytes / 1e9:.2f} GB, {choices.kv_dtype} K/V {plan.kv_bytes / 1e9:.2f} GB for "
        f"{plan.kv_tokens} tokens in pages of {choices.page_size}, {choices.attention} attention, "
        f"context {choices.max_model_len}, {device.device_kind} with "
        f"{plan.memory / 1e9:.1f} GB"
    )


def compile_count() -> int:
    """Programs this process has compiled, or fetched from the persistent cache, so far."""
    return _events()["/jax/core/compile/backend_compile_duration"]


def cache_hits() -> int:
    """How many of them came from the persistent cache."""
    return _events()["/jax/compilation_cache/cache_hits"]


@cache
def _events() -> Counter[str]:
    """Counts of jax's own monitoring events, registered once a process."""
    seen: Counter[str] = Counter()

    def listen(event: str, *_seconds: float, **_: Any) -> None:
        seen[event] += 1

    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen
