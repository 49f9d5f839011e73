"""`bench.gpu.trace`: sums of events, and a run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import trace


def event(name: str, start: float, duration: float) -> trace.Event:
    return {"name": name, "ts": start, "dur": duration}


def test_busy_counts_overlapping_events_once() -> None:
    events = [event("a", 0, 100), event("b", 50, 100), event("c", 300, 10), event("d", 60, 20)]
    assert trace.busy_ms(events) == pytest.approx(0.160)


def test_names_are_sorted_by_time() -> None:
    found = trace.by_name([event("a", 0, 100), event("b", 0, 3000), event("a", 0, 200)])
    assert [(one["name"], one["count"], one["ms"]) for one in found] == [("b", 1, 3), ("a", 2, 0.3)]


@pytest.mark.mlx
def test_times_are_written_after_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "CASES", [{"rows": 2, "prompt": 70, "new": 1}])
    trace.main(["--no-trace", "--json", str(tmp_path / "found.json")])
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert case["rows"] == 2
    assert case["ms"] > 0
