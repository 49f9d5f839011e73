"""`bench.gang_faults`: which process is which rank, and the sums over trials."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("mlx.core")  # the benches import it

from bench import gang_faults

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_rank_is_found_by_its_environment() -> None:
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "MLX_RANK": "1"},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert gang_faults.rank_of(process.pid) == 1
        process.communicate(b"\n")
    assert gang_faults.rank_of(os.getpid()) is None


def test_trials_are_summed() -> None:
    whole = {"start_s": 2.0, "whole streams": 4, "answer_s": 0.1}
    lost = {"start_s": 4.0, "whole streams": 0, "answer_s": None}
    assert gang_faults.summary([whole, lost]) == {
        "trials": 2,
        "streams": 8,
        "whole streams": 4,
        "later requests answered": 1,
        "start_s": 3.0,
    }
