"""The length of time slices, which workers and the governor share."""

from __future__ import annotations

LONG_STEP_S = 0.05
"""Length of a time slice at weight 1, in seconds. Workers whose steps together take less time need
no time slices: waiting for one step of every other worker is shorter than waiting for a slice."""
