"""The engine's parts beside mlx-lm's `BatchGenerator`, on models of random weights in real shapes.

What is timed is the loop that the engine runs: `Runner` over `ModelCache`, as the probe chose it,
one step ahead of the tokens that are read. No requests, no sockets: `bench.serve` has those. The
script is for CUDA and Metal machines; the shape ``tiny`` runs anywhere.
"""
