"""Histograms of phase durations."""

from __future__ import annotations

import time

from kvd.worker.process.phases import Phases
from protocol.types import SPAN_BOUNDS_S, DurationHistogram


def counted(histogram: DurationHistogram) -> dict[float, int]:
    """Return the nonempty buckets by their upper bound."""
    bounds = (*SPAN_BOUNDS_S, float("inf"))
    return {bound: count for bound, count in zip(bounds, histogram.counts, strict=True) if count}


def test_each_phase_lasts_until_the_next_one_or_the_end_of_the_step():
    phases = Phases()
    phases.enter("decode", 10.0)
    phases.enter("prefill", 10.004)
    phases.leave(10.054)
    phases.leave(99.0)
    phases.enter("decode", 100.0)
    phases.leave(100.2)

    histograms = phases.histograms()
    assert histograms.keys() == {"decode", "prefill"}
    assert counted(histograms["decode"]) == {0.005: 1, 0.25: 1}
    assert counted(histograms["prefill"]) == {0.1: 1}
    assert abs(histograms["decode"].total_s - 0.204) < 1e-9


def test_repeated_phases_count_once_and_idle_time_does_not_count():
    phases = Phases()
    phases.enter("decode", 0.0)
    phases.enter("decode", 0.003)
    phases.enter("idle", 0.004)
    phases.enter("decode", 60.0)
    phases.leave(60.001)

    assert phases.histograms().keys() == {"decode"}
    assert sum(phases.histograms()["decode"].counts) == 2
    assert abs(phases.histograms()["decode"].total_s - 0.005) < 1e-9


def test_durations_above_the_last_bound_are_counted():
    phases = Phases()
    phases.enter("pools", 0.0)
    phases.leave(SPAN_BOUNDS_S[-1] + 1)
    assert counted(phases.histograms()["pools"]) == {float("inf"): 1}


def test_histograms_can_be_added():
    phases = Phases()
    phases.enter("flush", 0.0)
    phases.leave(0.02)
    one = phases.histograms()["flush"]
    assert (one + one).counts == tuple(2 * count for count in one.counts)
    assert (one + one).total_s == 2 * one.total_s
    assert one + DurationHistogram() == one


def test_recording_phases_is_cheap():
    phases, clock, steps = Phases(), time.perf_counter, 20_000
    took = []
    for _ in range(5):  # the fastest run counts, because other processes use the CPU too
        start = clock()
        for _ in range(steps):
            phases.enter("decode", clock())
            phases.enter("decode", clock())
            phases.leave(clock())
        took.append((clock() - start) / steps)
    assert min(took) < 10e-6, "too slow for every step, which takes milliseconds"
