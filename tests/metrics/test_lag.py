"""`Lag`, which measures how late the event loop is, on the simulated and the real clock."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from kvd.host.loop import DaemonLoop
from kvd.metrics.lag import BUSY_S, IDLE_S, Lag
from tests.sim.loop import simulated


@simulated
async def test_the_lag_is_measured_often_while_there_is_work_and_rarely_otherwise():
    work = [True]
    lag = Lag(lambda: work[0])
    lag.start()
    await asyncio.sleep(10.05)
    assert abs(sum(lag.seen.counts) - 10 / BUSY_S) <= 1

    work[0] = False
    before = sum(lag.seen.counts)
    await asyncio.sleep(10.05)
    assert abs(sum(lag.seen.counts) - before - 10 / IDLE_S) <= 1
    assert lag.seen.total < 1e-6, "the simulated clock stands still while the loop works"

    lag.stop()
    before = sum(lag.seen.counts)
    await asyncio.sleep(10)
    assert sum(lag.seen.counts) == before


async def test_a_blocked_loop_is_measured():
    lag = Lag(lambda: True)
    lag.start()
    await asyncio.sleep(0.01)
    time.sleep(BUSY_S + 0.1)  # noqa: ASYNC251 - blocks the loop
    await asyncio.sleep(0.01)
    lag.stop()
    assert sum(lag.seen.counts) >= 1
    assert lag.seen.total >= 0.09


def test_a_stop_that_the_loops_clock_leaves_out_is_measured(monkeypatch):
    jumps, real = [], time.monotonic

    def read() -> float:
        return real() + sum(jumps)

    async def main() -> float:
        lag = Lag(lambda: True)
        lag.start()
        jumps.append(25.0)
        await asyncio.sleep(BUSY_S + 0.02)
        lag.stop()
        return lag.seen.total

    monkeypatch.setattr("kvd.metrics.lag.time", SimpleNamespace(monotonic=read))
    with asyncio.Runner(loop_factory=lambda: DaemonLoop(read)) as runner:
        assert runner.run(main()) > 24


def test_a_lag_that_never_started_can_be_stopped():
    Lag(lambda: False).stop()
