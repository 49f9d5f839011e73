"""Models over several ranks, with a real daemon and the fake engine in each process."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from protocol.policy import PolicyChange
from tests.process.first_start import Hold
from tests.process.helpers import Daemon, Reader, alive, source, wait_for, write_config


def load(daemon: Daemon, ranks: int = 3, **options: Any) -> list[int]:
    """Load a model over several ranks; return their process ids."""
    with daemon.client() as kvd:
        kvd.load(source(**options), alias="m", policy=PolicyChange(ranks=ranks)).result  # noqa: B018
    return pids(daemon)


def pids(daemon: Daemon) -> list[int]:
    return [it.pid for it in daemon.model("m").ranks]


def gone(found: list[int]) -> bool:
    return not any(alive(pid) for pid in found)


def expected(daemon: Daemon, prompt: str, count: int, seed: int) -> tuple[str, list[int]]:
    """Return what one process generates."""
    daemon.load(source(tps=0), "quick")
    with daemon.client() as kvd:
        found = kvd.generate("quick", prompt, max_tokens=count, seed=seed)
        return found.text, found.tokens


def test_a_gang_is_loaded_shown_and_unloaded_as_one_model(daemon: Daemon):
    loaded = daemon.kvctl("load", source(tps=0), "--alias", "m", "--ranks", "3")
    assert loaded.returncode == 0, loaded.stderr
    model = daemon.model("m")
    ranks = [it.pid for it in model.ranks]
    assert (len(set(ranks)), ranks[0]) == (3, model.worker_pid)
    assert {it.state for it in model.ranks} == {"running"}
    wait_for("all are read", lambda: all(it.footprint_bytes for it in daemon.model("m").ranks))
    page = daemon.kvctl("status", "m").stdout
    assert all(f"rank {rank}" in page and f"pid {pid}" in page for rank, pid in enumerate(ranks))
    with daemon.client() as kvd:
        assert kvd.generate("m", "Hi", max_tokens=5).text
        kvd.unload("m")
    assert gone(ranks)
    assert daemon.model_names() == []


def test_streams_survive_the_death_of_any_rank(daemon: Daemon):
    right = [expected(daemon, f"{seed}", 60, seed) for seed in range(2)]
    load(daemon, tps=50)
    deaths = [(0, signal.SIGKILL), (1, signal.SIGSEGV), (2, signal.SIGKILL)]
    for count, (rank, number) in enumerate(deaths, 1):
        first = pids(daemon)
        readers = [Reader(daemon, "m", f"{i}", max_tokens=60, seed=i).begun() for i in range(2)]
        os.kill(first[rank], number)
        for reader, tokens in zip(readers, right, strict=True):
            assert reader.finished().error is None
            assert (reader.completion.text, reader.completion.tokens) == tokens
        assert gone(first)
        assert daemon.model("m").restarts == count
        assert not set(first) & set(pids(daemon))
    ends = [it for it in daemon.log() if it["event"] == "worker_exit"]
    assert [(it["rank"], it["returncode"]) for it in ends] == [(r, -n) for r, n in deaths]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_stopped_does_not_outlive_the_others(daemon: Daemon, rank):
    first = load(daemon, tps=50)
    reader = Reader(daemon, "m", max_tokens=40).begun()
    os.kill(first[rank], signal.SIGSTOP)
    os.kill(first[(rank + 1) % 3], signal.SIGKILL)
    assert reader.finished().error is None
    assert len(reader.completion.tokens) == 40
    assert gone(first)


@pytest.mark.parametrize(
    ("rank", "number"), [(0, signal.SIGSTOP), (1, signal.SIGKILL), (2, signal.SIGSTOP)]
)
def test_a_rank_that_is_lost_while_the_gang_starts_costs_a_new_start(
    home, make_daemon, tmp_path, monkeypatch, rank, number
):
    hold = Hold(tmp_path, monkeypatch, rank)
    write_config(home, "[watchdog]\nspawning_s = 10\nterminated_s = 0.2")
    daemon = make_daemon().start()
    with daemon.client() as kvd:
        loading = kvd.load(source(), alias="m", policy=PolicyChange(ranks=3))
        first = wait_for("the ranks", lambda: hold.holds and pids(daemon))
        os.kill(first[rank], number)
        assert loading.result.state == "ready"
    assert gone(first)
    assert daemon.model("m").restarts == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_during_the_load_costs_a_new_start(daemon: Daemon, rank):
    with daemon.client() as kvd:
        loading = kvd.load(source(load=2), alias="m", policy=PolicyChange(ranks=3))
        wait_for("the load", lambda: daemon.has("m") and daemon.model("m").state == "loading")
        first = pids(daemon)
        os.kill(first[rank], signal.SIGKILL)
        assert loading.result.state == "ready"
    assert gone(first)
    assert daemon.model("m").restarts == 1


def test_no_rank_survives_its_daemon(daemon: Daemon):
    ranks = load(daemon, 4)
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    wait_for("all ranks end", lambda: gone(ranks))


def test_a_stopped_daemon_and_the_next_one_load_the_ranks_of_the_configuration(home, make_daemon):
    write_config(home, f'[[models]]\nsource = "{source(tps=0)}"\nalias = "m"\nranks = 2')
    daemon = make_daemon().start()
    ready = lambda: daemon.has("m") and daemon.model("m").state == "ready"  # noqa: E731
    wait_for("the model", ready)
    first = pids(daemon)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert gone(first)
    daemon.start()
    wait_for("the model again", ready)
    assert len(pids(daemon)) == len(first) == 2
