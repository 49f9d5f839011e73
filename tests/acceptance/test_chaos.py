"""A short `bench.chaos`: real workers die and hang while they serve many streams."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.worker import shallow

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_streams_have_the_tokens_of_an_undisturbed_run() -> None:
    chaos = pytest.importorskip("bench.chaos")
    found = asyncio.run(
        chaos.campaign(
            kills=2,
            stops=1,
            streams=12,
            other_streams=4,
            kinds=6,
            tokens=100,
            seed=3,
            model=shallow.path(),
        )
    )

    assert (found.wrong, found.remaining) == ([], [])
    assert (found.count("kill"), found.count("stop")) == (2, 1)
    assert found.streams >= 12
    assert found.other_streams >= 4
    assert found.restarts >= 2  # two of the three faults may hit the same process


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_streams_of_a_gang_have_the_tokens_of_one_process() -> None:
    """One kill and one stop of each rank, two of them while the gang starts or loads."""
    chaos = pytest.importorskip("bench.chaos")
    found = asyncio.run(
        chaos.campaign(
            kills=1,
            stops=1,
            streams=4,
            other_streams=0,
            kinds=4,
            tokens=60,
            seed=2,
            ranks=2,
            model=shallow.path(),
        )
    )

    assert (found.wrong, found.remaining) == ([], [])
    assert sorted((it.kind, it.rank) for it in found.faults) == [
        ("kill", 0), ("kill", 1), ("stop", 0), ("stop", 1)
    ]  # fmt: skip
    assert found.streams >= 4
    assert found.restarts >= 2


def test_a_plan_has_each_kind_of_fault_in_each_state_for_each_rank() -> None:
    chaos = pytest.importorskip("bench.chaos")
    plan = chaos.plan(kills=10, stops=5, ranks=3, seed=1)
    counts = Counter((it.kind, it.rank, it.state) for it in plan)

    for rank in range(3):
        assert [counts["kill", rank, state] for state in ("", "spawning", "loading")] == [6, 2, 2]
        assert [counts["stop", rank, state] for state in ("", "spawning", "loading")] == [3, 1, 1]
    # A model is given up after three crashes without a token in between.
    assert all(not (one.state and other.state) for one, other in pairwise(plan))
    assert not plan[0].state
    assert plan == chaos.plan(kills=10, stops=5, ranks=3, seed=1)


def test_the_counts_of_a_file_are_read_as_they_were_written() -> None:
    chaos = pytest.importorskip("bench.chaos")
    faults = [chaos.Fault("kill", 0, "ready", 2.5), chaos.Fault("stop", 2, "spawning")]
    found = chaos.Found(faults, 3, 100, 1, ["wrong"], 2, [77], 1, 9.5)

    assert chaos.Found.read(json.loads(json.dumps(found.written()))) == found
    assert found.back() == {
        "kill rank 0, ready": {"faults": 1, "measured": 1, "median_s": 2.5, "longest_s": 2.5},
        "stop rank 2, spawning": {"faults": 1, "measured": 0},
    }


def test_the_recorded_run_lost_nothing() -> None:
    found = json.loads((RESULTS / "chaos-linux-cpu.json").read_text())

    assert (found["wrong"], found["asked"]["streams"]) == ([], 16)
    assert found["kills"] >= 30
    assert found["stops"] > 0
    assert found["streams"] > 16
    assert found["other_streams"] > 16


def test_the_recorded_run_over_two_ranks_lost_nothing() -> None:
    chaos = pytest.importorskip("bench.chaos")
    report = json.loads((RESULTS / "chaos-gang-linux-cpu.json").read_text())
    found = chaos.Found.read(report)

    assert (found.wrong, found.remaining, report["asked"]["ranks"]) == ([], [], 2)
    cells = [(kind, rank) for kind in ("kill", "stop") for rank in range(2)]
    assert Counter((it.kind, it.rank) for it in found.faults) == dict.fromkeys(cells, 50)
    for state in ("spawning", "loading", "ready"):
        reached = Counter((it.kind, it.rank) for it in found.faults if it.state == state)
        assert all(reached[cell] >= 9 for cell in cells), state
    assert all(numbers["measured"] for numbers in found.back().values())


def test_the_recorded_runs_over_three_ranks_lost_nothing() -> None:
    chaos = pytest.importorskip("bench.chaos")
    counts: Counter[tuple[str, int]] = Counter()
    for name in ("chaos-gang-3-linux-cpu", "chaos-gang-3-other-seed-linux-cpu"):
        report = json.loads((RESULTS / f"{name}.json").read_text())
        found = chaos.Found.read(report)
        assert (found.wrong, found.remaining, report["asked"]["ranks"]) == ([], [], 3)
        counts.update((it.kind, it.rank) for it in found.faults)
    assert len(counts) == 6
    assert min(counts.values()) >= 50
