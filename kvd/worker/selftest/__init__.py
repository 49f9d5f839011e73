"""Checks of what only a run on this machine can show: `kvctl doctor --selftest`.

Nothing here depends on the tests: the expected values are computed here, in float64.
"""
