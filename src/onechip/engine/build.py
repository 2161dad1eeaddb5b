"""From a model string to a ready engine: design, weights, programs, one token generated.

1. The order is that of what can fail cheaply: what the config says and whether it fits is known before a weight is
   read.
2. Programs are compiled on threads of their own while the weights load, or come from a folder (`engine.saved`).
3. Ready means: the programs of the first answer are there and one token has been generated. The others join while the
   engine serves; until then plans stay within what is there.
4. Once the largest program is compiled its own memory analysis is what counts: where it asks for more than was planned
   and the device lacks it, pages are planned and programs compiled anew.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax

from onechip.cache.pages import PageTable
from onechip.chat.vocabulary import read_vocabulary
from onechip.checkpoint.base import Checkpoint
from onechip.checkpoint.source import default_cache_dir, open_checkpoint
from onechip.config import DTypeName, EngineConfig, ModelConfig
from onechip.engine import saved
from onechip.engine.counts import cache_hits, compiles, unplanned_compiles
from onechip.engine.design import Design, Hardware, design
from onechip.engine.grammar_compiler import GrammarCompiler
from onechip.engine.loop import Engine, run_until_idle
from onechip.engine.memory import device_memory
from onechip.engine.pace import Pace
from onechip.engine.profile import Profile
from onechip.engine.programs import Needs, Programs, Shapes, needed, needed_first
from onechip.engine.progress import Reporter
from onechip.engine.runner import DeviceRunner
from onechip.engine.scheduler import Scheduler
from onechip.model.load import load_params, random_params, shapes_of
from onechip.model.params import check_tensors
from onechip.model.spec import model_config
from onechip.request import EngineInfo, Request, SamplingParams

log = logging.getLogger("onechip.engine")


@dataclass
class Building:
    """One engine's start: what it is made of and when it began."""

    spec: ModelConfig
    config: EngineConfig
    device: Any
    report: Reporter
    started: float

    def since_start(self) -> float:
        return time.monotonic() - self.started


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
    building = Building(spec, config, device, report, time.monotonic())
    hardware = hardware_of(device)
    wanted = design(spec, config, hardware)
    if not config.random_weights:
        check_tensors(spec, shapes_of(checkpoint), checkpoint.source)
    log.info("%s", _summary(checkpoint, spec, wanted, device))
    programs = _begin(building, wanted)
    params = _load(checkpoint, wanted.shapes.config, config, wanted.dtype, device, report)
    loaded = building.since_start()
    log.info("weights loaded after %.1f s", loaded)
    wanted, programs = _enough(building, hardware, wanted, programs)
    pages = PageTable(wanted.shapes.page_size, wanted.plan.shapes)
    runner = DeviceRunner(wanted.shapes, wanted.table, params, pages, device, programs)
    scheduler = Scheduler(pages, config.max_seqs, wanted.table.limits())
    info = EngineInfo(
        vocab_size=spec.vocab_size,
        max_model_len=wanted.max_model_len,
        max_seqs=config.max_seqs,
        kv_tokens=wanted.plan.kv_tokens,
        device=device.device_kind,
        dtype=wanted.dtype,
        load_seconds=loaded,
        compile_seconds=building.since_start() - loaded,
        first_token_seconds=0.0,
        page_size=wanted.shapes.page_size,
    )
    vocabulary = partial(read_vocabulary, checkpoint, default_cache_dir())
    make = partial(
        Engine,
        runner,
        scheduler,
        max_waiting=config.max_waiting,
        grammars=GrammarCompiler(vocabulary, spec.vocab_size, spec.eos_ids),
        pace=Pace(wanted.shapes.steps),
    )
    return _warm(make, info, runner, config) if config.precompile else make(info)


def hardware_of(device: Any) -> Hardware:
    capability = getattr(device, "compute_capability", None)
    return Hardware(
        device.platform, device_memory(device), None if capability is None else float(capability)
    )


def _begin(building: Building, wanted: Design) -> Programs:
    """Load the programs, or start to compile them; nothing where they are compiled on first use."""
    programs, config = Programs(wanted.shapes, building.device), building.config
    if config.programs is not None:
        saved.load(Path(config.programs), needed(wanted.table), programs, building.device)
        log.info("%d programs loaded from %s", len(programs.ready), config.programs)
    elif config.precompile:
        programs.begin(needed(wanted.table), _told(building, wanted))
    return programs


def _told(building: Building, wanted: Design) -> Callable[[str], None]:
    """What hears of each program as it is done: the progress bar, and the log after the last."""
    total, done = len(needed(wanted.table)), count(1)
    before, hits = compiles(), cache_hits()

    def progress(name: str) -> None:
        number = next(done)
        if building.report.compiling is not None:
            building.report.compiling(number, total, name if number < total else "")
        if number == total:
            log.info(
                "%d programs after %.1f s, %d of them from the compile cache",
                compiles() - before, building.since_start(), cache_hits() - hits,
            )  # fmt: skip

    return progress


def _enough(
    building: Building, hardware: Hardware, wanted: Design, programs: Programs
) -> tuple[Design, Programs]:
    """Wait for the first programs, and plan anew with what they need where they do not fit."""
    if not building.config.precompile:
        return wanted, programs
    programs.wait(needed_first(wanted.table))
    needs = programs.needs()
    planned = wanted.plan.needs
    if (
        needs.temporaries <= planned.temporaries
        or wanted.plan.spare > needs.temporaries - planned.temporaries
    ):
        return wanted, programs
    log.warning(
        "programs need %.2f GB for temporaries, %.2f were planned: planning the pages anew",
        needs.temporaries / 1e9, planned.temporaries / 1e9,
    )  # fmt: skip
    programs.stop()
    measured = Needs(needs.temporaries, planned.code)
    wanted = design(building.spec, building.config, hardware, measured)
    programs = _begin(building, wanted)
    programs.wait(needed_first(wanted.table))
    return wanted, programs


def _warm(
    make: Callable[..., Engine], info: EngineInfo, runner: DeviceRunner, config: EngineConfig
) -> Engine:
    """Generate one token through the whole path. Compiles that nobody planned are counted from here on."""
    started = time.monotonic()
    engine = make(info)
    engine.limits = runner.limits
    sampling = SamplingParams(max_tokens=2, temperature=0.0, seed=0)
    engine.submit(Request("warm-up", (0,), sampling))
    run_until_idle(engine)
    seconds = time.monotonic() - started
    log.info("first token after %.2f s", seconds)
    before = unplanned_compiles()
    ready = make(
        replace(info, first_token_seconds=seconds),
        compiles=lambda: unplanned_compiles() - before,
    )
    ready.limits = runner.limits
    if config.profile is not None:
        ready.profile = Profile(Path(config.profile), config.profile_steps)
    return ready


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


def _enable_compile_cache(config: EngineConfig) -> None:
    """jax's persistent cache: its keys hold program, versions, device and flags already."""
    if config.compile_cache == "off":
        return
    folder = Path(config.compile_cache) if config.compile_cache else default_cache_dir() / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _ways(shapes: Shapes) -> str:
    """What was chosen among implementations."""
    experts = f"{shapes.experts} experts, " if shapes.config.moe is not None else ""
    layers = "in loops" if shapes.config.scan_layers else "unrolled"
    return f"{shapes.attention} attention, {experts}layers {layers}"


def _summary(checkpoint: Checkpoint, spec: ModelConfig, wanted: Design, device: Any) -> str:
    plan = wanted.plan
    return (
        f"{checkpoint.source}: {spec.family}, {len(spec.layers)} layers, {wanted.dtype} weights "
        f"{plan.weight_bytes / 1e9:.2f} GB, {wanted.kv_dtype} K/V {plan.kv_bytes / 1e9:.2f} GB for "
        f"{plan.kv_tokens} tokens in pages of {wanted.shapes.page_size}, {plan.needs.total / 1e9:.2f} GB for programs, "
        f"{_ways(wanted.shapes)}, context {wanted.max_model_len}, {device.device_kind} with {plan.memory / 1e9:.1f} GB"
    )
