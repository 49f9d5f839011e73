"""Compares kvd, `mlx_lm.server`, llama-server and other OpenAI-compatible servers.

`kvd.bench` has the traces, clients and statistics, which `kvctl bench` uses too. This package adds
the compared sides, their limits (`goals`), the CPU time and memory of the servers' processes, and
the CPU time of other programs (`machine`). All servers load one model without an end-of-text token
(`kvd.bench.twin`, `bench.llama.gguf`), so that every server produces exactly the requested tokens.
`check_fair` verifies that after every run. `bench.kv` and `bench.gpu` measure parts of an engine.
"""
