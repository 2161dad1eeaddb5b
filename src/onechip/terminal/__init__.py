"""`onechip chat`: a conversation in the terminal with any OpenAI-compatible server. No jax, no engine."""
