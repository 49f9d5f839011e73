"""Decode attention alone, on the machine's GPU: pages beside dense keys and values.

The fused kernels, the reference over pages and MLX's dense kernel run in one process on the same
shapes; nothing of a model is there but its queries. Every number is of a result that was compared
with attention in float32 before. Whole steps are in `bench.gpu`.
"""
