"""Compares kvd, `mlx_lm.server` and other OpenAI-compatible servers with the same requests.

`kvd.bench` has the traces, clients and statistics, which `kvctl bench` uses too. This package adds
the compared sides, their limits (`bars`), and the CPU time and memory of the servers' processes.
All servers load one model folder without an end-of-text token (`kvd.bench.twin`), so that every
server produces exactly the requested tokens. `check_fair` verifies that after every run. `bench.kv`
and `bench.gpu` measure parts of an engine.
"""
