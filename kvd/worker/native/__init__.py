"""kvd's own operations for MLX's CPU backend, in C++.

MLX computes norms, rotary positions and attention on the CPU as chains of small operations, and
converts half floats to compute; for a decode step of a few rows that is most of the time. Here each
of them is one operation of MLX's graph, weights stay half floats, and a row's numbers never depend
on who shares its batch.

`build` compiles and caches the library, `operations` calls it, `layers` gives them to a model,
`step` is what decode attention reads.
"""
