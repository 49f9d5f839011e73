"""Compares kvd, `mlx_lm.server` and other OpenAI-compatible servers with the same requests.

All servers get the same seeded traces, in alternation, and every token is timed at the client
(`drivers`, `player`). `twin` makes one model folder for all, without an end-of-text token, so that
every server produces exactly the requested tokens. `measure.check_fair` verifies that after every
run. `bench.kv` and `bench.gpu` measure parts of an engine.
"""
