"""Fused decode attention: split-K flash decoding straight from the page table.

`decode` is the algorithm, written once; `language` what Metal and CUDA call the few things that
they call differently; `launch` makes of a step's arrays two launches, and gives them to MLX.
"""
