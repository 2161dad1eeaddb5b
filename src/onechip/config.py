"""The three frozen configurations: what the model is, how the engine runs it, how the server offers it.

`ModelConfig` is computed once from a checkpoint (`model.spec`), with one `LayerSpec` row a layer; nothing in it is a
default of an architecture. `EngineConfig` and `ServerConfig` hold the flags of `onechip serve`, under the same names
as the keywords of `LLM`. This module knows neither jax nor files.
"""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["sliding", "full"]
DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer kind: half-split pairs, angle = position * inv_freq.

    kind "default": inv_freq_j = theta^(-2j/H), all H/2 pairs. "linear": the same divided by `factor`.
    "proportional": the exponents run over the whole head, but only the first `partial` of the pairs turn.
    """

    theta: float
    kind: Literal["default", "linear", "proportional"] = "default"
    factor: float = 1.0
    partial: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """One row of the layer table, printed by `onechip inspect`.

    `kv_source` is the layer whose K/V this one reads: itself, unless the layer shares (and then owns none).
    `window` counts visible keys including the query's own; None on full-attention layers.
    """

    index: int
    kind: LayerKind
    kv_source: int
    kv_heads: int
    head_dim: int
    window: int | None
    rope: Rope
    k_eq_v: bool
    ffn_dim: int

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index


@dataclass(frozen=True)
class MoeConfig:
    """Mixture-of-experts block beside the dense MLP: `experts` of width `ffn_dim`, `top_k` per token."""

    experts: int
    top_k: int
    ffn_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """A text model, as its checkpoint describes it.

    `query_scale` multiplies the scores (1.0 in Gemma 4), `norm_offset` is added to every norm weight (1.0 in Gemma 3,
    whose reference multiplies by 1 + w). `ple_dim` is the per-layer input width, 0 where the model has none.
    `scan_layers` alone is the engine's choice, not the checkpoint's: how layers lie and run (`model.stack`).
    """

    family: Literal["gemma3", "gemma4"]
    vocab_size: int
    hidden_size: int
    heads: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: float
    query_scale: float
    final_softcap: float | None
    tie_embeddings: bool
    ple_dim: int
    ple_vocab_size: int
    moe: MoeConfig | None
    max_positions: int
    bos_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    stored_dtype: DTypeName
    scan_layers: bool = False

    @property
    def owners(self) -> tuple[LayerSpec, ...]:
        """Layers that store K/V, in order."""
        return tuple(layer for layer in self.layers if layer.owns_kv)

    @property
    def first_shared(self) -> int:
        """Index after the last layer that owns K/V: from here on nothing is written, so a prompt may exit early."""
        return self.owners[-1].index + 1

    @property
    def window(self) -> int | None:
        """The sliding window, None for a model without sliding layers."""
        return next((layer.window for layer in self.layers if layer.window is not None), None)


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs: the flags of `serve` and keywords of `LLM` that shape memory and speed.

    None and "auto" mean "decided at start from the device and the model", and the choice is logged. `scan_layers` says
    whether layers that repeat run in loops (`model.stack`). `chunk_size` is the most prefill tokens a step,
    `decode_steps` the most decode steps a launch (while nobody waits); `compile_cache` a directory or "off";
    `precompile` compiles every program before the engine is ready (a server must never compile later; `LLM` compiles
    on first use unless told otherwise); `programs` is a folder of compiled ones to load instead, as
    `onechip compile --out` writes it. `profile` is a folder for a trace of the first `profile_steps` launches after the
    engine is ready.
    """

    max_seqs: int = 16
    max_model_len: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    page_size: int | None = None
    chunk_size: int | None = None
    kv_tokens: int | None = None
    max_waiting: int = 1024
    random_weights: bool = False
    seed: int = 0
    attention: str = "auto"
    scan_layers: Literal["auto", "on", "off"] = "auto"
    decode_steps: int | None = None
    compile_cache: str | None = None
    precompile: bool = True
    programs: str | None = None
    profile: str | None = None
    profile_steps: int = 64


@dataclass(frozen=True)
class ServerConfig:
    """How the server offers the engine over HTTP. Times are in seconds; an empty `cors_origins` allows every origin."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    cors: bool = True
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    request_timeout: float | None = None
    ping_seconds: float = 15.0
    drain_seconds: float = 25.0
    stored_responses: int = 1000
    stored_responses_bytes: int = 64 << 20
    log_format: Literal["text", "json"] = "text"
    access_log: bool = True
    otlp_endpoint: str | None = None
