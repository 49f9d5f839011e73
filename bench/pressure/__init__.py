"""Many streams of several models under a budget that holds a part of what they would take.

``python -m bench.pressure --help`` says how. Covers what clients see (all streams finish, and say
what they would have said), what the processes take while it goes on, and what the governor did.
Does not cover how it decides: the simulations in ``tests/sim`` do.
"""
