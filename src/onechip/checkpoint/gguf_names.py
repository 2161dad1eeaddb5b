"""The names of GGUF tensors: llama.cpp's on the left, the reference implementation's on the right.

Owns the one table of names for this source, for the architectures gemma3 and gemma4. Refuses to know which tensors a
model needs: whoever reads the checkpoint compares, strictly, in both directions.
"""

import re
from collections.abc import Mapping

GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "norm.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}

# Of one layer: after "blk.N." and after "layers.N.".
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
}

# The halves of experts.gate_up_proj, in order, for files that store them apart.
EXPERT_HALVES = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
JOINED = "experts.gate_up_proj"

# Divisors of the rotary frequencies: `gguf_config` turns them into the config's partial factor.
ROPE_FREQS = "rope_freqs.weight"

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def is_ignored(name: str) -> bool:
    """Whether a stored tensor is no parameter of the text model: the rotary divisors, or a tower's."""
    return name == ROPE_FREQS or name.startswith(("v.", "a.", "mm."))


def canonical_name(name: str) -> tuple[str, int]:
    """The reference's name, and which part of that tensor this one is (0, or 1 for the second expert half).

    A name outside the tables is returned as it is.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return GLOBAL_NAMES.get(name, name), 0
    layer, rest = match.groups()
    if rest in EXPERT_HALVES:
        return f"layers.{layer}.{JOINED}", EXPERT_HALVES.index(rest)
    found = LAYER_NAMES.get(rest)
    return (name if found is None else f"layers.{layer}.{found}"), 0


def norm_offset(architecture: str, name: str) -> float:
    """What the file adds to the reference's value of tensor `name`.

    llama.cpp's Gemma 3 norms hold w + 1, as its graph multiplies by the stored value; its Gemma 4 norms hold w.
    """
    return 1.0 if architecture == "gemma3" and name.endswith("norm.weight") else 0.0
