"""Checks that only the machine itself can prove: `kvctl doctor --selftest`.

Nothing here depends on the tests: the expected values are computed here, in float64.
"""
