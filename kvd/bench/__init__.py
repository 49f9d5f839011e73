"""Measures servers by timing every token at the client, for `kvctl bench` and `bench.serve`.

All servers get the same seeded traces (`traces`, `prompts`), and `player` records when tokens
arrive. `measure` computes throughput and latencies. `servers` starts servers and connects to those
that run already.
"""
