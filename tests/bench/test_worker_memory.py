"""The bench of a worker's memory: medians, the committed result, and the page that quotes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import worker_memory

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "bench" / "results" / "worker-memory-linux-cpu.json"


def run(kvd, mlx_lm):
    return {"kvd": {"idle": {"mb": kvd}}, "mlx-lm": {"idle": {"mb": mlx_lm}}}


def test_medians_are_taken_over_runs():
    found = worker_memory.medians([run(1.0, 5.0), run(9.0, 6.0), run(2.0, 7.0)])
    assert found == run(2.0, 6.0)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_the_size_of_this_process_is_read():
    before = worker_memory.pss_mb(os.getpid())
    block = bytearray(os.urandom(64)) * (4 * 1024 * 1024)
    grown = worker_memory.pss_mb(os.getpid()) - before
    # This process's share of libraries changes while processes with the same ones start and end.
    assert grown == pytest.approx(len(block) / 1e6, rel=0.2)


def test_a_worker_takes_at_most_the_memory_of_mlx_lms_server():
    found = json.loads(RESULT.read_text())["models"]["demo"]
    assert found["medians"] == worker_memory.medians(found["runs"])
    assert len(found["runs"]) >= 3
    kvd, mlx_lm = found["medians"]["kvd"], found["medians"]["mlx-lm"]
    assert set(kvd) == {"first answer", "after steady", "after long", "idle"}
    for moment in kvd:
        assert kvd[moment]["mb"] <= mlx_lm[moment]["mb"], moment


def test_the_page_quotes_the_result():
    found = json.loads(RESULT.read_text())["models"]["demo"]["medians"]
    assert worker_memory.table(found) in (ROOT / "docs" / "performance.md").read_text()
