"""What an engine will be, worked out before anything is loaded or compiled: choices, memory plan, shapes.

Serving and `onechip compile` follow the same arithmetic, the one for the device at hand, the other for a chip that may
be elsewhere. Owns what `auto` and None in an EngineConfig come to. Touches no device.
"""

from dataclasses import dataclass, replace

from onechip.cache.pages import peak_pages
from onechip.config import DTypeName, EngineConfig, ModelConfig
from onechip.engine.buckets import BucketTable, bucket_table, page_size_for
from onechip.engine.memory import MemoryPlan, estimated_needs, plan_memory
from onechip.engine.programs import Needs, Shapes
from onechip.errors import ConfigError
from onechip.kernels import attention, grouped_matmul
from onechip.model import stack
from onechip.model.load import param_bytes

LAUNCH_STEPS = 8  # most decode steps of one launch on an accelerator
DEFAULT_MODEL_LEN = 8192  # tables and logs say so; longer contexts are one flag away


@dataclass(frozen=True)
class Hardware:
    """What the choices depend on. `memory`: usable bytes. `capability`: a GPU's compute capability, else None."""

    platform: str
    memory: int
    capability: float | None = None


@dataclass(frozen=True)
class Design:
    dtype: DTypeName
    kv_dtype: DTypeName
    max_model_len: int
    table: BucketTable
    plan: MemoryPlan
    shapes: Shapes


def design(
    spec: ModelConfig, config: EngineConfig, hardware: Hardware, needs: Needs | None = None
) -> Design:
    """Everything decided. `needs` are the programs' measured ones, where they are known already.

    Raises ConfigError for flags that do not fit the model, DoesNotFit with the numbers.
    """
    spec = _laid_out(spec, config, hardware)
    length = config.max_model_len or min(spec.max_positions, DEFAULT_MODEL_LEN)
    if not 2 <= length <= spec.max_positions:
        raise ConfigError(
            f"max_model_len is {length}; the model's positions allow 2 to {spec.max_positions}"
        )
    dtype = preferred_dtype(hardware) if config.dtype == "auto" else config.dtype
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    page = page_size_for(hardware.platform) if config.page_size is None else config.page_size
    table = bucket_table(config.max_seqs, config.chunk_size, hardware.platform)
    # A launch costs the host a few ms, little beside a CPU's step and much beside an accelerator's.
    steps = config.decode_steps or (1 if hardware.platform == "cpu" else LAUNCH_STEPS)
    plan = plan_memory(
        spec,
        config,
        max_model_len=length,
        page=page,
        chunk=table.chunk,
        steps=steps,
        weight_bytes=param_bytes(spec, dtype),
        kv_bytes_per_value=4 if kv_dtype == "float32" else 2,
        needs=needs or estimated_needs(spec, table),
        memory=hardware.memory,
    )
    shapes = Shapes(
        config=spec,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page,
        max_seqs=config.max_seqs,
        full_columns=-(-length // page),
        sliding_columns=peak_pages(length, max(table.chunk, steps), spec.window, page),
        attention=attention.choose(
            config.attention,
            hardware.platform,
            page_size=page,
            head_dims=[layer.head_dim for layer in spec.owners],
            kv_dtype=kv_dtype,
            capability=hardware.capability,
        ),
        pages={kind: pool.pages for kind, pool in plan.shapes.items()},
        platform=hardware.platform,
        steps=steps,
        experts=grouped_matmul.choose(hardware.platform, hardware.capability),
    )
    return Design(dtype, kv_dtype, length, table, plan, shapes)


def _laid_out(spec: ModelConfig, config: EngineConfig, hardware: Hardware) -> ModelConfig:
    """With `scan_layers` decided. A CPU or GPU copies each turn's weights out of their stack before its matmuls."""
    refusal = stack.why_not(spec)
    if config.scan_layers == "on" and refusal is not None:
        raise ConfigError(f"scan_layers is on, but {refusal}; use auto")
    wanted = config.scan_layers == "on" or (
        config.scan_layers == "auto" and hardware.platform == "tpu"
    )
    return replace(spec, scan_layers=wanted and refusal is None)


def preferred_dtype(hardware: Hardware) -> DTypeName:
    """bfloat16, but float16 on a GPU that has no bfloat16 (before compute capability 8.0; override with --dtype)."""
    capability = hardware.capability
    if hardware.platform == "gpu" and capability is not None and capability < 8.0:
        return "float16"
    return "bfloat16"
