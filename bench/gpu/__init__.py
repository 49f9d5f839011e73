"""Compares the engine's decode loop with mlx-lm's `BatchGenerator`, on random weights.

The timed loop is the engine's: a `Runner` over a `ModelCache`, as chosen by the probe. It launches
each step before it reads the previous step's tokens. There are no requests and no sockets, which
`bench.serve` measures. The benchmark is for CUDA and Metal machines; the shape ``tiny`` runs on any
machine.
"""
