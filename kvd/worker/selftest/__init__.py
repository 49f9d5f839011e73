"""Checks that only the machine itself can prove: `kvctl doctor --selftest`.

`__main__` runs the checks one after another and prints each outcome immediately, so that a crash
costs only the check that caused it. Nothing here depends on the tests: the expected values are
computed here, in float64.
"""
