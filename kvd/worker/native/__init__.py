"""kvd's own operations for MLX's CPU backend, in C++.

MLX computes norms, RoPE and attention on the CPU as chains of small operations, and converts half
floats to float32 before it multiplies. In a decode step of a few rows that takes most of the time.
In this library, each norm, RoPE and attention is one operation of MLX's graph, and weights stay
half floats. A row's numbers never depend on the other rows of its batch.
"""
