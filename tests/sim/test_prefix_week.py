"""A simulated week of agents (`tests.sim.prefix_week`)."""

from __future__ import annotations

import pytest

from tests.sim.prefix_week import LEAST_RATE, compare, run


@pytest.mark.slow
def test_a_limited_store_has_nine_tenths_of_an_unlimited_ones_hits_in_spite_of_faults():
    found = run(7)
    assert found["ratio"] >= LEAST_RATE
    counts = found["counts"]
    assert all(counts[f"{name} fault"] for name in ("worker", "daemon", "disk"))
    assert counts["damaged"]
    assert counts["failed disk commands"]


def test_a_tight_limit_on_writes_is_kept():
    week = compare(3, share=0.1, daily_share=0.25, days=2.0)
    refused = week.usages[1].sim.counts["refused: daily_writes"]
    assert refused > 10, "the limit was never reached"
