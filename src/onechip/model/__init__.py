"""What Gemma means: the layer table, the parameters and the forward pass.

Axis legend of the whole package: B rows (sequences in a step), T packed tokens, S keys, D hidden width, F feed-forward
width, N query heads, K key/value heads, G = N / K query heads a K/V head, H head dim, L layers, I per-layer input
width, V vocabulary, E experts, P pages, Z tokens a page, M pages a row's table holds.
"""
