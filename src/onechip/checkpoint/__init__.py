"""Bytes and names: where a model string points, which tensors a file holds, and what they are called.

Readers hand out numpy arrays under the reference implementation's names. What a weight means, and jax, live above.
"""
