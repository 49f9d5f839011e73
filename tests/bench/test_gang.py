"""`bench.gang`: bars, servers that fail, and the command that starts mlx-lm's ranks."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench import gang
from kvd.bench.servers import Side, mlx_lm_side

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


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Replace the servers; returns the names of those that fail in their second round."""
    failing: set[str] = set()

    @contextlib.asynccontextmanager
    async def started(sides: list[Side], *_: Any) -> AsyncIterator[dict[str, str]]:
        yield {side.name: side.name for side in sides}

    async def play(server: str, number: int, _: Any) -> dict[str, float]:
        if number and server in failing:
            raise RuntimeError("its thread died")
        return {"tokens/s": 10.0 + number}

    async def idle(servers: dict[str, str]) -> dict[str, list[float]]:
        return {name: [0.0] for name in servers}

    for name, replaced in (("Fleet", started), ("play", play), ("idle", idle)):
        monkeypatch.setattr(gang, name, replaced)
    return failing


OPTIONS = argparse.Namespace(ranks=2, only=None, rounds=2)


async def test_another_server_that_fails_is_left_out(fleet: set[str], tmp_path: Path):
    fleet.add("mlx-lm, 2 ranks")
    found = await gang.measure(OPTIONS, tmp_path)
    assert found["mlx-lm, 2 ranks"] == {"failed": "its thread died"}
    assert {found[name]["tokens/s"] for name in ("kvd", "kvd, 2 ranks", "mlx-lm")} == {11.5}


async def test_a_server_of_kvd_that_fails_ends_the_measurement(fleet: set[str], tmp_path: Path):
    fleet.add("kvd, 2 ranks")
    with pytest.raises(RuntimeError, match="its thread died"):
        await gang.measure(OPTIONS, tmp_path)
