"""The embedded model over two ranks of a real daemon: the loss of a rank changes no token."""

from __future__ import annotations

import os
import signal

import pytest

from kvd.host.home import Home
from protocol.policy import PolicyChange
from tests.process.helpers import Daemon, Reader, alive, wait_for, write_config

pytestmark = [pytest.mark.mlx, pytest.mark.process, pytest.mark.slow]

PATIENCE_S = 300.0
"""Each layer waits for both ranks, so a busy machine slows them down a lot."""


STOPPED = "[watchdog]\ndecode_s = 8\nterminated_s = 0.5"
"""Nothing tells the daemon that a process is stopped: only the deadline of the step ends the gang,
which is 300 s by default."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_the_embedded_model_survive_the_loss_of_a_follower(
    home: Home, number: int
) -> None:
    """tests/process/test_gangs.py kills each rank of the fake engine."""
    if number == signal.SIGSTOP:
        write_config(home, STOPPED)
    daemon = Daemon(home).start()
    try:
        daemon.load("demo", "one")
        with daemon.client() as kvd:
            loaded = kvd.load("demo", alias="two", policy=PolicyChange(ranks=2)).result
        first = [it.pid for it in loaded.ranks]
        options = {"max_tokens": 24, "seed": 3}
        expected = Reader(daemon, "one", "Once upon a time", **options).finished(PATIENCE_S)
        reader = Reader(daemon, "two", "Once upon a time", **options)
        wait_for("tokens", lambda: len(reader.completion.tokens) >= 3, PATIENCE_S)
        os.kill(first[1], number)
        assert reader.finished(PATIENCE_S).error is None
        assert reader.completion.tokens == expected.completion.tokens
        assert not any(alive(pid) for pid in first)
        assert daemon.model("two").restarts == 1
        second = [it.pid for it in daemon.model("two").ranks]
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_for("all ranks end", lambda: not any(alive(pid) for pid in second))
    finally:
        daemon.end()
