"""Benchmark: many streams of several models under a budget that is only a part of their demand.

``python -m bench.pressure --help`` describes the runs. The benchmark covers what clients see (all
streams finish, with the same tokens as without pressure), the memory of the processes, and the
governor's actions. How the governor decides is covered by the simulations in ``tests/sim``.
"""
