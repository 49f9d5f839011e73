"""A short `bench.prefix_faults`: damaged files, a kill during a write, and a failing disk."""

from __future__ import annotations

import asyncio
import sys

import pytest


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_faults_of_disk_and_processes_give_no_wrong_token_and_leave_no_file() -> None:
    faults = pytest.importorskip("bench.prefix_faults")
    # Each prompt takes twice the time that is worth a segment.
    limits = faults.Limits(prefill_s=0.5)
    found = asyncio.run(
        faults.run(prompts=4, corruptions=3, each=3, kills=1, failures=1, seed=3, limits=limits)
    )

    assert found.wrong == []
    assert sum(found.corruptions.values()) >= 3
    assert found.damage_events + found.corruptions["gone"] > 0
    assert found.worker_kills > 0
    assert found.daemon_kills > 0
    assert found.restored > 0
    if sys.platform == "linux" and faults.compiler() is not None:
        assert found.failed_calls > 0
