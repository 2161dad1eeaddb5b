"""Arrays in, arrays out: attention over pages and the grouped matmul of a mixture of experts.

One public op each, with `implementation=`, which is obeyed or raises. Kernels know neither the model nor requests.
"""
