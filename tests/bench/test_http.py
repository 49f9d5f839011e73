"""`bench/http`: a small run, and whether the recorded run stays within the limits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import http

RESULT = Path(__file__).parents[2] / "bench" / "results" / "http-linux-cpu.json"


def test_the_recorded_run_stays_within_the_limits():
    run = json.loads(RESULT.read_text())
    fields = {name: run[name] for name in http.Found.__dataclass_fields__}
    found = http.Found(**fields | {k: http.Lag(**run[k]) for k in ("lag", "machine_lag")})
    assert (found.streams, found.requests) == (400, 10_000)
    assert found.lag.looks >= 200
    assert http.faults(found) == []


def test_a_broken_limit_is_reported():
    late = http.Found(wrong=["x"], lag=http.Lag(100, 0.01, 0.1), footprint_bytes=[10, 100, 106])
    assert [fault.split()[0] for fault in http.faults(late)] == ["x", "lag", "memory"]


@pytest.mark.slow
@pytest.mark.process
async def test_two_hundred_streams_of_each_kind_and_flat_memory():
    options = argparse.Namespace(
        streams=200, tokens=15, tps=10.0, rounds=1, requests=500, at_once=16, first=False
    )
    found = await http.run(options)
    assert found.wrong == []
    assert (found.streams, found.tokens, found.requests) == (400, 6000, 500)
    # The machine may be busy, so the limit grows with the lag of a process that only sleeps.
    assert found.lag.looks > 0
    assert found.lag.mean_s < http.LAG_LIMIT_S + 10 * found.machine_lag.mean_s
    assert len(found.footprint_bytes) == 11
    assert found.footprint_bytes[-1] < 1.05 * found.footprint_bytes[1]
