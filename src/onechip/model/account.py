"""What a model costs: bytes resident, bytes a decode step streams, bytes of K/V, and how much fits on a chip.

Pure arithmetic over the parameter list and the layer table. It describes; the plan that an engine really allocates by
also knows the compiled programs' temporaries and is made at start. Refuses to know files, jax and page tables.
"""

from dataclasses import dataclass

from onechip.config import DTypeName, LayerSpec, ModelConfig
from onechip.errors import ConfigError, DoesNotFit
from onechip.model.params import ParamSpec, parameter_specs

ITEM_BYTES: dict[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
VECTOR_BYTES = 4  # norms, scales and scalars stay float32
MARGIN = 0.08  # of a chip's memory, for programs and their temporaries: 14.5 of a v5e's 15.75 GiB proved usable


@dataclass(frozen=True)
class Chip:
    """Memory in bytes, bandwidth in bytes a second, dense bf16 operations a second, and where they come from."""

    name: str
    memory: int
    bandwidth: int
    flops: int
    source: str


_CLOUD = "memory as the device reports it; the rest from Google Cloud's TPU documentation"
_NVIDIA = "NVIDIA's data sheet"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("tpu-v5e-1", 16_909_000_000, 819_000_000_000, 197_000_000_000_000, _CLOUD),
        Chip("tpu-v6e-1", 33_550_000_000, 1_640_000_000_000, 918_000_000_000_000, _CLOUD),
        Chip("cuda-h200", 141_000_000_000, 4_800_000_000_000, 989_000_000_000_000, _NVIDIA),
        Chip("cuda-h100", 80_000_000_000, 3_350_000_000_000, 989_000_000_000_000, _NVIDIA),
        Chip("cuda-l4", 24_000_000_000, 300_000_000_000, 121_000_000_000_000, _NVIDIA),
    )
}


@dataclass(frozen=True)
class Account:
    """The costs of one model in one dtype, all in bytes but the first two.

    `resident` and `streamed` count every parameter in that dtype; keeping the vectors in float32 adds `widened` to
    both. `streamed` is what one decode step of one row reads, `gathered` the table rows it looks up on top. `kv_token`
    grows with every token of context (full-attention layers); `kv_window` is the most that a sequence keeps in the
    sliding layers. Layers that share K/V cost neither.
    """

    parameters: int
    matmul_parameters: int
    resident: int
    streamed: int
    widened: int
    gathered: int
    kv_token: int
    kv_window: int


@dataclass(frozen=True)
class Fit:
    """What a chip holds beside the weights.

    `tokens` is the context of all sequences together when `sequences` run, each with a window of its own;
    `tokens_per_second` the most that one sequence can reach when the weights stream at the chip's bandwidth: a bound,
    not a measurement.
    """

    chip: Chip
    free: int
    sequences: int
    tokens: int
    tokens_per_second: float


def account(config: ModelConfig, dtype: DTypeName, kv_dtype: DTypeName) -> Account:
    """The costs of `config` with weights in `dtype` and K/V in `kv_dtype`."""
    specs = parameter_specs(config).values()
    total = sum(spec.size for spec in specs)
    active = sum(_active(config, spec) for spec in specs)
    vectors = sum(spec.size for spec in specs if spec.use == "vector")
    item, kv_item = ITEM_BYTES[dtype], ITEM_BYTES[kv_dtype]
    return Account(
        parameters=total,
        matmul_parameters=active - vectors,
        resident=total * item,
        streamed=active * item,
        widened=vectors * (VECTOR_BYTES - item),
        gathered=sum(_row_values(config, spec) for spec in specs) * item,
        kv_token=sum(_kv_values(row) for row in config.owners if row.window is None) * kv_item,
        kv_window=sum(_kv_values(row) * (row.window or 0) for row in config.owners) * kv_item,
    )


def find_chip(name: str) -> Chip:
    """The chip called `name`. Raises ConfigError naming those known."""
    if name not in CHIPS:
        raise ConfigError(f"chip {name!r} is unknown; known are {', '.join(CHIPS)}")
    return CHIPS[name]


def fit(costs: Account, chip: Chip, sequences: int) -> Fit:
    """How much context fits on `chip` with `sequences` running. Raises DoesNotFit when the weights alone do not."""
    usable = int(chip.memory * (1 - MARGIN))
    free = usable - costs.resident - costs.widened
    if free < costs.kv_token + costs.kv_window:
        raise DoesNotFit(
            f"the weights take {costs.resident / 1e9:.3f} GB and one sequence's window {costs.kv_window / 1e9:.3f} GB; "
            f"{chip.name} has {usable / 1e9:.3f} GB usable of {chip.memory / 1e9:.3f}; choose a larger chip or a "
            f"smaller model or dtype"
        )
    tokens = max(0, free - sequences * costs.kv_window) // max(1, costs.kv_token)
    return Fit(chip, free, sequences, tokens, chip.bandwidth / (costs.streamed + costs.widened))


def layer_parameters(config: ModelConfig, layer: LayerSpec) -> int:
    """Values in the parameters of one layer."""
    prefix = f"layers.{layer.index}."
    specs = parameter_specs(config).values()
    return sum(spec.size for spec in specs if spec.path.startswith(prefix))


def layer_kv_bytes(layer: LayerSpec, kv_dtype: DTypeName) -> int:
    """K/V bytes the layer stores a token: 0 where it reads another layer's."""
    return _kv_values(layer) * ITEM_BYTES[kv_dtype] if layer.owns_kv else 0


def _kv_values(layer: LayerSpec) -> int:
    # K and V differ even where k_eq_v joins their projections: V is not rotated.
    return 2 * layer.kv_heads * layer.head_dim


def _active(config: ModelConfig, spec: ParamSpec) -> int:
    """Values of the parameter that a decode step of one row reads in full."""
    if spec.use == "gather":
        return 0
    if spec.use == "experts":
        assert config.moe is not None
        return spec.size * config.moe.top_k // config.moe.experts
    return spec.size


def _row_values(config: ModelConfig, spec: ParamSpec) -> int:
    is_table = spec.use == "gather" or (spec.use == "head" and config.tie_embeddings)
    return spec.shape[-1] if is_table else 0
