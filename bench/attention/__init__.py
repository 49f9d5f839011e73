"""Benchmark of decode attention on the machine's GPU, over pages and over dense keys and values.

The fused kernels, the reference over pages and MLX's dense kernel run in one process on the same
shapes, without the rest of a model. Each result is compared with float32 attention before it is
timed. `bench.gpu` measures whole steps.
"""
