"""Text and dialect: tokenizer, chat template, incremental detokenisation, stop strings. Never pages, never jax."""
