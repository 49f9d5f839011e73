"""Fused decode attention: split-K flash decoding straight from the page table.

`decode` holds the algorithm, written once. `language` maps the few primitives that Metal and CUDA
name differently. `launch` turns a step's arrays into two launches and passes them to MLX.
"""
