"""`bench.pressure` without its runs: streams, memory readings, the summary and the plot."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from msgspec.structs import replace

from bench.pressure.__main__ import summary
from bench.pressure.draw import draw
from bench.pressure.play import Outcome, Run
from bench.pressure.streams import make
from bench.pressure.watch import _own_pages, kinds_of
from kvd.host.memory import reader
from protocol.types import MemoryUse, ModelStatus, WorkerStats
from tests.sim.fakes import INFO

pytestmark = pytest.mark.mlx

KINDS = {"weights": 5, "pages k8v8": 30, "free pages": 8, "tails": 9}


def run(**fields) -> Run:
    outcomes = [Outcome("a", [1, 2], "length", levels=[0]), Outcome("b", [3], "length")]
    outcomes[1].levels, outcomes[1].events = [0, 2], {"paused": 1}
    watched = {
        "samples": [[0.0, 90, 0, 0], [1.0, 101, 0, 0]],
        "kinds": [{"at": at, "granted": 99, "by_kind": KINDS} for at in (0.0, 1.0)],
    }
    values = {
        "outcomes": outcomes,
        "watched": watched,
        "bases": {"a": 40, "b": 20},
        "budget": 100,
        "governed": "footprint",
        "peak_granted": 99,
        "peak_footprint": 101,
        "actions": [{"kind": "reclaim_precision", "at": 0.5}],
        "violations": 0,
        "seconds": 2.0,
    }
    return Run(**(values | fields))


def test_streams_depend_on_the_seed_and_are_spread_evenly_over_the_models():
    asked = {"prompt": 400, "completion": 60, "seed": 5}
    streams = make(["a", "b", "c"], 24, **asked)

    assert streams == make(["a", "b", "c"], 24, **asked)
    assert streams != make(["a", "b", "c"], 24, **(asked | {"seed": 6}))
    assert Counter(one.model for one in streams) == {"a": 8, "b": 8, "c": 8}
    assert all(200 <= len(one.tokens) <= 600 and 30 <= one.max_tokens <= 90 for one in streams)
    heads = [tuple(one.tokens[:100]) for one in streams if one.model == "a"]
    assert max(Counter(heads).values()) == 2, "some streams share a prefix"


def test_own_pages_are_within_the_footprint_and_zero_for_an_unknown_process():
    whole = reader().footprint(os.getpid())

    assert whole == 0 or 0 < _own_pages(os.getpid()) <= 1.05 * whole
    assert _own_pages(2**22 + 1) == 0


def test_pages_are_counted_by_their_scheme():
    memory = MemoryUse(weights=5, kv_pages=50, kv_pages_used=42, kv_levels=(30, 12), kv_tails=9)
    info = replace(INFO, kv_schemes=["k8v8", "k4v4"])
    model = ModelStatus(
        name="a", source="a", state="ready", info=info, stats=WorkerStats(memory=memory)
    )

    assert kinds_of(model) == KINDS | {"pages k4v4": 12}


def test_the_summary_of_a_run_within_all_limits():
    reported = summary(run(), 1, [])

    assert reported["held"]
    assert reported["streams_by_levels"] == {"0": 1, "0->2": 1}
    assert reported["streams_paused"] == 1
    assert reported["peak_footprint_over_budget"] == 0.01


@pytest.mark.parametrize(
    ("fields", "differ"),
    [
        ({"peak_footprint": 104}, []),
        ({"violations": 1}, []),
        ({}, [1]),
        ({"outcomes": [Outcome("a", [1], "", "worker_died: x", levels=[0])]}, []),
    ],
)
def test_the_summary_reports_a_missed_limit(fields, differ):
    assert not summary(run(**fields), 1, differ)["held"]


def test_the_plot_has_every_kind(tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw({"pressed": run().as_dict(), "bases_bytes": 60, "budget_bytes": 100}, tmp_path / "a.svg")

    text = (tmp_path / "a.svg").read_text()
    for name in ("bases", "pages k8v8", "tails", "footprint, 20 Hz", "budget"):
        assert f"<!-- {name} -->" in text
