"""The committed result of `bench.routers` is within the promised limits, and the page quotes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "bench/results/routers-linux-cpu.json").read_text())
PAGE = (ROOT / "docs/scaling.md").read_text()
ROUTERS = ("nginx", "litellm")


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_find_nearly_as_many_prefixes_as_one_daemon(router: str):
    rates = RESULT["hit_rate"]
    assert rates[router] >= 0.95 * rates["daemon"]
    assert rates["rotation"] < 0.8 * rates["daemon"], "the trace needs sessions"


@pytest.mark.parametrize("router", ROUTERS)
def test_a_kill_costs_the_next_requests_no_error(router: str):
    assert RESULT["failover"][router]["errors"] == 0
    assert RESULT["failover"][router]["sessions"] > 0


def test_the_page_quotes_the_result():
    latency, rates = RESULT["latency"], RESULT["hit_rate"]
    columns = ("daemon", *ROUTERS)
    for key in ("p10_ms", "p50_ms"):
        cells = [f"{latency[name][key]:.1f} ms" for name in columns]
        assert f"| {' | '.join(cells)} | |" in PAGE
    cells = [f"{rates[name]:.3f}" for name in (*columns, "rotation")]
    assert f"| {' | '.join(cells)} |" in PAGE
    failover = [RESULT["failover"][name] for name in ROUTERS]
    for cells in (
        [f"0 of {one['sessions']}" for one in failover],
        [f"{one['slowest_ms']:.0f} ms" for one in failover],
        [f"{one['back_after_s']} s" for one in failover],
    ):
        assert f"| | {' | '.join(cells)} | |" in PAGE
