"""A real worker that has served many prompts holds little more memory than a fresh one."""

from __future__ import annotations

import sys
import time

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


def served(daemon: Daemon, words: int, number: int) -> int:
    """Run ``number`` requests of about ``2 * words`` tokens at once; return the peak footprint."""
    pid, memory, peak = daemon.worker_pid("demo"), reader(), 0
    readers = [
        Reader(daemon, "demo", f"{index} " * words, max_tokens=64, ignore_eos=True, seed=index)
        for index in range(number)
    ]
    end = time.monotonic() + 120
    while any(one.is_alive() for one in readers) and time.monotonic() < end:
        peak = max(peak, memory.footprint(pid))
        readers[-1].join(0.05)
    for one in readers:
        assert one.finished(0).error is None
    return peak


def test_an_idle_worker_returns_the_memory_of_its_requests() -> None:
    with configured(CONFIG) as daemon:
        daemon.start()
        wait_for("demo is ready", lambda: daemon.model("demo").state == "ready", 120)
        pid, memory = daemon.worker_pid("demo"), reader()
        served(daemon, 100, 1)
        fresh = memory.footprint(pid)
        assert served(daemon, 800, 16) > 1.25 * fresh

        wait_for("memory is returned", lambda: memory.footprint(pid) <= 1.2 * fresh, 60)
        assert daemon.worker_pid("demo") == pid
