"""The daemon's clock leaves out the time in which the daemon did not run."""

from __future__ import annotations

import asyncio
import time

from hypothesis import example, given
from hypothesis import strategies as st

from kvd.host.loop import LATE_S, DaemonLoop, RunningClock

SPANS = st.floats(min_value=0, max_value=100)


@given(st.lists(st.tuples(SPANS, st.booleans(), SPANS)))
@example([(10.0, True, 25.0)])
@example([(1.1616516427087191, False, 29.0), (0.0, False, 100.0)])  # rounded down
def test_the_clock_leaves_out_gaps_and_nothing_else(steps):
    """Each step: seconds of an intended wait, whether it ended early, and seconds of delay."""
    at, gaps = 50.0, []
    clock = RunningClock(lambda: at, gaps.append)
    now, counted = clock.now(), 0.0
    for wait, early, delay in steps:
        seen, at = at, at + (wait / 2 if early else wait + delay)
        late = at - seen - wait
        before, now = now, clock.now(wait)
        assert now >= before
        counted += at - seen - (late if late > LATE_S else 0.0)
        assert abs(now - 50.0 - counted) < 1e-6
        assert abs(sum(gaps) - (at - now)) < 1e-6


def run(main, *, jumps: list[float]) -> None:
    """Run on a loop whose clock is ahead by the sum of the jumps."""
    with asyncio.Runner(
        loop_factory=lambda: DaemonLoop(lambda: time.monotonic() + sum(jumps))
    ) as it:
        it.run(main())


def test_a_deadline_does_not_pass_while_the_daemon_is_stopped():
    jumps: list[float] = []

    async def main() -> None:
        loop, fired = asyncio.get_running_loop(), []
        began = loop.time()
        loop.call_later(10, fired.append, "deadline")
        jumps.append(25.0)  # the process was stopped, and continues
        for _ in range(5):
            await asyncio.sleep(0)
        assert not fired
        assert loop.time() - began < 5

    run(main, jumps=jumps)


def test_waits_and_short_delays_count():
    jumps: list[float] = []

    async def main() -> None:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        before = loop.time()
        await asyncio.sleep(0.02)
        jumps.append(LATE_S / 2)  # a busy loop
        assert abs((loop.time() - before) - (time.monotonic() - began) - LATE_S / 2) < LATE_S / 4

    run(main, jumps=jumps)
