"""kvd beside `mlx_lm.server` and other OpenAI-compatible servers: same model, machine and requests.

All servers are driven with the same seeded traces, in turn, and every token is timed where a client
sees it (`drivers`, `player`). What is fair is arranged in `twin` (one model folder for all, without
an end-of-text token, so that everybody makes exactly the tokens asked for) and checked after every
run (`measure.check_fair`). Does not look into engines: see `bench.kv` and `bench.gpu` for parts.
"""
