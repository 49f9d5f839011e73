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


def test_gaps_end_with_the_event_that_runs_next() -> None:
    events = [event("c", 1900, 10), event("a", 100, 300), event("b", 150, 900), event("d", 1500, 9)]
    assert trace.idle(events) == []
    events[0]["ts"] = 2060
    assert trace.idle(events) == [{"at_ms": 1.41, "ms": 0.55, "before": "c"}]
    assert trace.idle([]) == []


@pytest.mark.mlx
def test_times_are_written_after_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "CASES", [{"rows": 2, "prompt": 70, "new": 1}])
    trace.main(["--no-trace", "--json", str(tmp_path / "found.json")])
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert case["rows"] == 2
    assert case["ms"] > 0


@pytest.mark.mlx
def test_a_prompt_of_its_own(tmp_path: Path) -> None:
    trace.main(["--no-trace", "--prompt", "70", "--json", str(tmp_path / "found.json")])
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert (case["rows"], case["prompt"], case["new"]) == (1, 70, 1)
