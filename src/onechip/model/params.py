"""One description per parameter: device path, shape, logical axes, and the checkpoint tensors it is made of.

Random init, the strict checkpoint check, byte accounting, ahead-of-time compiles and (later) sharding all follow from
`parameter_specs`. Weights keep the reference's [out, in] layout. Projections that read the same input are joined along
their output axis when loaded (q+k+v, gate+up): one matmul, one launch. Norm weights stay float32, with the family's
offset added once at load. Which bytes become which tensor is `checkpoint`; how they are used is `gemma`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from onechip.config import LayerSpec, ModelConfig
from onechip.errors import CheckpointError
from onechip.model import stack

Use = Literal["matmul", "gather", "head", "experts", "vector"]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the device holds it.

    `path` is its place among the model's ("layers.3.qkv_proj"), `axes` one logical axis a dimension (legend:
    `onechip.model`), `sources` the reference tensors joined along axis 0, with `source_shapes` as stored.
    `use`: "matmul" and "head" are streamed once a step, "experts" partly, "gather" is read a row a token, "vector" is
    small and kept in float32 (`offset` is added at load: 1 + w in Gemma 3).
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    use: Use
    offset: float = 0.0

    @property
    def size(self) -> int:
        total = 1
        for n in self.shape:
            total *= n
        return total


# ("embed",) or ("layers", entry of `stack.entries`, "qkv_proj")
Place = tuple[str] | tuple[str, int, str]


@dataclass(frozen=True)
class DeviceArray:
    """One array on the device: a parameter, or those of several equal layers along a leading axis (`stack`)."""

    specs: tuple[ParamSpec, ...]

    @property
    def stacked(self) -> bool:
        return len(self.specs) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.specs[0].shape
        return (len(self.specs), *shape) if self.stacked else shape


def parameter_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Every parameter of the text model by path, in the order of the forward pass."""
    specs = [*_embeddings(config)]
    for layer in config.layers:
        specs += _attention(config, layer)
        specs += _feed_forward(config, layer)
        specs += _per_layer_input(config, layer)
    specs.append(_vector(config, "final_norm", "norm.weight", config.hidden_size, "D"))
    if not config.tie_embeddings:
        shape = (config.vocab_size, config.hidden_size)
        specs.append(_matrix("lm_head", "V D", [("lm_head.weight", shape)], use="head"))
    return {spec.path: spec for spec in specs}


def device_arrays(config: ModelConfig) -> dict[Place, DeviceArray]:
    """Every array of the parameter tree by its place there."""
    specs = parameter_specs(config)
    arrays: dict[Place, DeviceArray] = {}
    for path, spec in specs.items():
        if not path.startswith("layers."):
            arrays[(path,)] = DeviceArray((spec,))
    for entry, layers in enumerate(stack.entries(config)):
        first = f"layers.{layers[0]}."
        for name in [path.removeprefix(first) for path in specs if path.startswith(first)]:
            parts = tuple(specs[f"layers.{layer}.{name}"] for layer in layers)
            arrays["layers", entry, name] = DeviceArray(parts)
    return arrays


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Strict both ways: every expected tensor present once with its shape, none left over. Raises CheckpointError.

    Layers that share K/V may carry or lack k_proj, v_proj and k_norm; a tied model may repeat its table as lm_head.
    """
    expected = {
        name: shape
        for spec in parameter_specs(config).values()
        for name, shape in zip(spec.sources, spec.source_shapes, strict=True)
    }
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise CheckpointError(
            _listing(source, "lacks", missing, "the file must match its config.json")
        )
    extra = sorted(found.keys() - expected.keys() - set(ignorable(config)))
    if extra:
        raise CheckpointError(_listing(source, "holds", extra, "no part of this model uses them"))
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {list(found[name])}, the config says {list(shape)}"
            )


def ignorable(config: ModelConfig) -> Iterator[str]:
    """Tensors a file may carry although nothing reads them."""
    if config.tie_embeddings:
        yield "lm_head.weight"
    for layer in config.layers:
        if not layer.owns_kv:
            for name in ("k_proj", "v_proj", "k_norm"):
                yield f"layers.{layer.index}.self_attn.{name}.weight"


def _listing(source: str, verb: str, names: list[str], remedy: str) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{source}: {verb} {len(names)} tensor(s) the model does not match: {shown}; {remedy}"


def _embeddings(config: ModelConfig) -> Iterator[ParamSpec]:
    d, count, i = config.hidden_size, len(config.layers), config.ple_dim
    table = ("embed_tokens.weight", (config.vocab_size, d))
    yield _matrix("embed", "V D", [table], use="head" if config.tie_embeddings else "gather")
    if i:
        ple = ("embed_tokens_per_layer.weight", (config.ple_vocab_size, count * i))
        yield _matrix("ple_table", "V LI", [ple], use="gather")
        yield _matrix("ple_proj", "LI D", [("per_layer_model_projection.weight", (count * i, d))])
        yield _vector(config, "ple_norm", "per_layer_projection_norm.weight", i, "I")


def _attention(config: ModelConfig, layer: LayerSpec) -> Iterator[ParamSpec]:
    path, prefix = f"layers.{layer.index}.", f"layers.{layer.index}.self_attn."
    d, h, n, k = config.hidden_size, layer.head_dim, config.heads, layer.kv_heads
    parts = [(prefix + "q_proj.weight", (n * h, d))]
    if layer.owns_kv:
        parts.append((prefix + "k_proj.weight", (k * h, d)))
        if not layer.k_eq_v:
            parts.append((prefix + "v_proj.weight", (k * h, d)))
    yield _vector(config, path + "attn_norm", path + "input_layernorm.weight", d, "D")
    yield _matrix(path + "qkv_proj", "NH D", parts)
    yield _vector(config, path + "q_norm", prefix + "q_norm.weight", h, "H")
    if layer.owns_kv:
        yield _vector(config, path + "k_norm", prefix + "k_norm.weight", h, "H")
    yield _matrix(path + "o_proj", "D NH", [(prefix + "o_proj.weight", (d, n * h))])
    yield _vector(config, path + "post_attn_norm", path + "post_attention_layernorm.weight", d, "D")


def _feed_forward(config: ModelConfig, layer: LayerSpec) -> Iterator[ParamSpec]:
    path, d, f = f"layers.{layer.index}.", config.hidden_size, layer.ffn_dim
    gate_up = [(f"{path}mlp.{name}_proj.weight", (f, d)) for name in ("gate", "up")]
    yield _vector(config, path + "ffn_norm", path + "pre_feedforward_layernorm.weight", d, "D")
    yield _matrix(path + "gate_up_proj", "2F D", gate_up)
    yield _matrix(path + "down_proj", "D F", [(path + "mlp.down_proj.weight", (d, f))])
    yield _vector(
        config, path + "post_ffn_norm", path + "post_feedforward_layernorm.weight", d, "D"
    )
    if config.moe is not None:
        yield from _experts(config, path)


def _experts(config: ModelConfig, path: str) -> Iterator[ParamSpec]:
    assert config.moe is not None
    d, e, f = config.hidden_size, config.moe.experts, config.moe.ffn_dim
    yield _vector(config, path + "router_scale", path + "router.scale", d, "D")
    yield _matrix(path + "router_proj", "E D", [(path + "router.proj.weight", (e, d))])
    yield _vector(config, path + "expert_scale", path + "router.per_expert_scale", e, "E")
    gate_up, down = path + "experts.gate_up_proj", path + "experts.down_proj"
    yield _matrix(path + "experts_gate_up", "E 2F D", [(gate_up, (e, 2 * f, d))], use="experts")
    yield _matrix(path + "experts_down", "E D F", [(down, (e, d, f))], use="experts")
    for ours, theirs in (
        ("post_dense_norm", "post_feedforward_layernorm_1"),
        ("experts_norm", "pre_feedforward_layernorm_2"),
        ("post_experts_norm", "post_feedforward_layernorm_2"),
    ):
        yield _vector(config, path + ours, f"{path}{theirs}.weight", d, "D")


def _per_layer_input(config: ModelConfig, layer: LayerSpec) -> Iterator[ParamSpec]:
    path, d, i = f"layers.{layer.index}.", config.hidden_size, config.ple_dim
    if i:
        gate, out = path + "per_layer_input_gate.weight", path + "per_layer_projection.weight"
        yield _matrix(path + "ple_gate", "I D", [(gate, (i, d))])
        yield _matrix(path + "ple_out", "D I", [(out, (d, i))])
        yield _vector(
            config, path + "ple_post_norm", path + "post_per_layer_input_norm.weight", d, "D"
        )
    if config.family == "gemma4":
        yield _vector(config, path + "layer_scalar", path + "layer_scalar", 1, "1")


def _matrix(
    path: str, axes: str, parts: list[tuple[str, tuple[int, ...]]], use: Use = "matmul"
) -> ParamSpec:
    names, shapes = tuple(name for name, _ in parts), tuple(shape for _, shape in parts)
    shape = (sum(s[0] for s in shapes), *shapes[0][1:])
    return ParamSpec(path, shape, tuple(axes.split()), names, shapes, use)


def _vector(config: ModelConfig, path: str, source: str, size: int, axis: str) -> ParamSpec:
    offset = config.norm_offset if "norm" in path else 0.0
    return ParamSpec(path, (size,), (axis,), (source,), ((size,),), "vector", offset)
