"""A Gemma 4 of four layers that compiles quickly: both layer kinds, shared K/V, per-layer inputs; random weights."""

import json
from pathlib import Path
from typing import Any

WINDOW = 8
VOCAB = 512


def tiny_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size": 32,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": None,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": [1, 106],
    }
    return {**config, **changes}


def write_tiny(folder: Path, **changes: Any) -> str:
    """A directory that holds nothing but the config: for `random_weights=True`."""
    (folder / "config.json").write_text(json.dumps(tiny_config(**changes)))
    return str(folder)
