"""A real worker that has served many prompts holds little more memory than a fresh one."""

from __future__ import annotations

import sys

import pytest

from kvd.host.memory import reader
from tests.process.helpers import Daemon, Reader, configured, wait_for

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="footprints of Linux"),
]

CONFIG = """
[[models]]
source = "demo"
[models.kv]
scheme = "k16v16"
prefix_cache = 0
"""


def serve(daemon: Daemon, words: int, number: int) -> None:
    """Run ``number`` requests at once, of about ``words`` tokens each."""
    readers = [
        Reader(daemon, "demo", f"{index} " * words, max_tokens=64, ignore_eos=True, seed=index)
        for index in range(number)
    ]
    for one in readers:
        assert one.finished(120).error is None


def test_an_idle_worker_returns_the_memory_of_its_requests() -> None:
    with configured(CONFIG) as daemon:
        daemon.start()
        wait_for("demo is ready", lambda: daemon.model("demo").state == "ready", 120)
        pid, memory = daemon.worker_pid("demo"), reader()
        serve(daemon, 100, 1)
        fresh = memory.footprint(pid)
        serve(daemon, 2500, 12)

        wait_for("memory is returned", lambda: memory.footprint(pid) <= 1.2 * fresh, 10)
        assert daemon.worker_pid("demo") == pid
