"""The names of safetensors files: which prefix the text model carries, and which tensors are not
text.

Owns the one table of names for this source. Refuses to know which tensors a model needs: whoever
reads the checkpoint compares, strictly, in both directions.
"""

# Longest first, so that a prefix is never taken for the beginning of another.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")

# How names of the text model begin after its prefix. Towers have `layers.N.` of their own, so a
# name counts as text only when prefix and root both fit.
TEXT_ROOTS = ("embed_tokens", "layers.", "norm.weight", "per_layer_", "lm_head.")

TOWER_ROOTS = (
    "vision_tower.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
    "vision_model.",
)
TOWER_PREFIXES = ("model.", "")

ROTARY_SUFFIX = "rotary_emb.inv_freq"  # a buffer of old exports; the config describes it


def is_ignored(name: str) -> bool:
    """Whether a stored tensor belongs to a tower or is a buffer that the config already describes."""
    towers = tuple(prefix + root for prefix in TOWER_PREFIXES for root in TOWER_ROOTS)
    return name.startswith(towers) or name.endswith(ROTARY_SUFFIX)


def canonical_name(name: str) -> str:
    """The name without the text model's prefix; a name that fits no prefix is returned as it is."""
    for prefix in TEXT_PREFIXES:
        rest = name.removeprefix(prefix)
        if name.startswith(prefix) and rest.startswith(TEXT_ROOTS):
            return rest
    return name
