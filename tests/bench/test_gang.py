"""`bench.gang`: bars, and the command that starts mlx-lm's ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import gang
from kvd.bench.servers import mlx_lm_side

pytestmark = pytest.mark.mlx


def numbers(tokens: float, prefill: float) -> dict[str, float]:
    return {"tokens/s": tokens, "prefill s": prefill}


def test_bars_compare_the_gang_with_one_rank():
    servers = {"kvd": numbers(100, 2.0), "kvd, 2 ranks": numbers(95, 1.4)}
    decode, prefill = gang.bars(servers, 2)
    assert (decode["value"], decode["passed"]) == (0.95, True)
    assert (prefill["value"], prefill["passed"]) == (0.7, False)
    assert gang.bars({"kvd, 2 ranks": numbers(95, 1.4)}, 2) == []


@pytest.mark.parametrize(("cuda", "backend"), [(True, "nccl"), (False, "ring")])
def test_ranks_of_mlx_lm_are_connected_as_those_of_kvd(monkeypatch, cuda, backend):
    monkeypatch.setattr(gang.nvidia, "has_cuda_build", lambda: cuda)
    side = gang.launched(mlx_lm_side("mlx-lm", "/model", blas=None), 2)
    command = list(side.command)
    assert Path(command[0]).parent == Path(sys.executable).parent
    assert command[1:5] == ["-n", "2", "--backend", backend]
    assert ("--starting-port" in command) is not cuda
