"""The embedded model over two ranks of a real daemon: faults of ranks change no token.

`test_chaos.py` kills and stops ranks at random moments.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.host.home import Home
from protocol.gang import DIVERGED
from protocol.policy import PolicyChange
from tests.process.first_start import Hold, addresses, in_first_start
from tests.process.helpers import Daemon, Reader, alive, wait_for, write_config
from tests.worker.gang.test_gang_ends import SWAPPED_PAGES

pytestmark = [pytest.mark.mlx, pytest.mark.process, pytest.mark.slow]

PATIENCE_S = 300.0
"""Each layer waits for both ranks, so a busy machine slows them down a lot."""
START_S = 20.0
"""Deadline for the start of the ranks: ample here, and shorter than the deadline for the load."""
PROMPT = "Once upon a time, " * 60
"""Several pages."""


@pytest.fixture
def daemon(home: Home) -> Iterator[Daemon]:
    write_config(home, f"[watchdog]\nspawning_s = {START_S}\nterminated_s = 0.5")
    made = Daemon(home)
    yield made
    made.end()


def pids(daemon: Daemon) -> list[int]:
    return [it.pid for it in daemon.model("two").ranks]


def load(daemon: Daemon) -> list[int]:
    with daemon.client() as kvd:
        loaded = kvd.load("demo", alias="two", policy=PolicyChange(ranks=2)).result
    return [it.pid for it in loaded.ranks]


def expected(daemon: Daemon, count: int = 24) -> list[int]:
    """Return the tokens of one process."""
    daemon.load("demo", "one")
    return stream(daemon, "one", count).finished(PATIENCE_S).completion.tokens


def stream(daemon: Daemon, model: str, count: int = 24) -> Reader:
    return Reader(daemon, model, PROMPT, max_tokens=count, seed=3, ignore_eos=True)


def test_requests_of_the_embedded_model_survive_the_loss_of_a_follower(daemon: Daemon) -> None:
    """tests/process/test_gangs.py kills each rank of the fake engine."""
    daemon.start()
    many = 400  # 24 may be complete before a busy machine's next look at them
    right = expected(daemon, many)
    first = load(daemon)
    reader = stream(daemon, "two", many)
    wait_for("tokens", lambda: len(reader.completion.tokens) >= 3, PATIENCE_S)
    os.kill(first[1], signal.SIGKILL)
    assert reader.finished(PATIENCE_S).error is None
    assert reader.completion.tokens == right
    assert not any(alive(pid) for pid in first)
    assert daemon.model("two").restarts == 1
    second = pids(daemon)
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    wait_for("all ranks end", lambda: not any(alive(pid) for pid in second))


def test_a_rank_with_another_order_of_pages_costs_a_new_start_and_no_token(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_first_start(tmp_path, monkeypatch, 1, SWAPPED_PAGES)
    daemon.start()
    right = expected(daemon)
    first = load(daemon)
    reader = stream(daemon, "two").finished(PATIENCE_S)
    assert (reader.error, reader.completion.tokens) == (None, right)
    assert not any(alive(pid) for pid in first)
    ends = [(it["rank"], it["returncode"]) for it in daemon.log() if it["event"] == "worker_exit"]
    assert ends == [(1, DIVERGED)]
    assert daemon.model("two").restarts == 1


def test_a_silent_stranger_on_a_port_of_the_ring_costs_a_new_start_and_not_the_load(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold(tmp_path, monkeypatch, 1, joining=True)
    daemon.start()
    with daemon.client() as kvd:
        loading = kvd.load("demo", alias="two", policy=PolicyChange(ranks=2))
        first = wait_for("the ranks", lambda: hold.holds and pids(daemon), PATIENCE_S)
        leader, _ = addresses(first[0])
        with connected(leader) as stranger:
            hold.release()  # the real rank comes too late
            while stranger.recv(1 << 16):
                pass
        assert loading.result.state == "ready"
    assert not any(alive(pid) for pid in first)
    assert daemon.model("two").restarts == 1
    assert stream(daemon, "two").finished(PATIENCE_S).error is None


def connected(address: tuple[str, int]) -> socket.socket:
    """Return a connection to a rank once it listens."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(address, timeout=PATIENCE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the rank does not listen"
            time.sleep(0.01)
