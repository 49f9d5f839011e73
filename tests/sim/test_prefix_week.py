"""A simulated week of agents (`tests.sim.prefix_week`)."""

from __future__ import annotations

import pytest

from tests.sim.prefix_week import compare


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_third_of_the_bytes_saves_nine_tenths_of_the_tokens(seed):
    oracle, limited = compare(seed, share=1 / 3).usages
    assert oracle.restored > 0.5 * oracle.queried, "the traffic has nothing to store"
    assert limited.rate >= 0.9 * oracle.rate


def test_a_tight_limit_on_writes_is_kept():
    week = compare(3, share=0.1, daily_share=0.25, days=2.0)
    refused = week.usages[1].sim.refused
    assert refused["daily_writes"] > 10, "the limit was never reached"
