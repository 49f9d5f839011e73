"""`bench.served` compares a server that has served other traces with a new one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import served
from kvd import demo
from kvd.bench.prompts import Prompts
from kvd.bench.servers import Server, Side


class Servers:
    """Stands in for the fleet: a server is its name."""

    def __init__(self, sides: list[Side], _folder: Path) -> None:
        self._sides = sides

    async def __aenter__(self) -> dict[str, str]:
        return {side.name: side.name for side in self._sides}

    async def __aexit__(self, *_: object) -> None: ...


def test_both_servers_play_the_same_prompts_alternately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[tuple[str, str, int]] = []

    async def run(server: str, _prompts: Prompts, name: str, number: int) -> tuple[float, float]:
        played.append((server, name, number))
        return (900.0, 0.002) if server == "served" else (1000.0, 0.001)

    monkeypatch.setattr(served, "Fleet", Servers)
    monkeypatch.setattr(served, "run", run)
    found = asyncio.run(served.compare(str(demo.path()), "k8v8", 3, tmp_path))

    assert found == {
        "tokens": 0.9,
        "cpu": 2.0,
        "tokens_of_runs": [0.9] * 3,
        "cpu_of_runs": [2.0] * 3,
    }
    before, after = played[:13], played[13:]
    assert {name for server, name, _ in before if server == "served"} == set(served.OTHERS)
    assert [(server, name) for server, name, _ in before if server == "new"] == [("new", "steady")]
    assert [server for server, *_ in after] == ["new", "served", "served", "new", "new", "served"]
    numbers = [number for *_, number in after]
    assert numbers[::2] == numbers[1::2]
    assert len(set(numbers)) == 3
    assert not set(numbers) & {number for *_, number in before}


def test_cpu_time_is_that_of_all_processes_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [served.processes.Reading(1, "d", 0.5, 0), served.processes.Reading(2, "w", 2.0, 0)]
    monkeypatch.setattr(served.processes, "read", lambda _pids: readings)
    server = Server.__new__(Server)
    monkeypatch.setattr(Server, "pids", lambda _self: [1, 2])
    assert served._cpu_seconds(server) == 2.5
