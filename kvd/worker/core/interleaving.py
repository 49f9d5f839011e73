"""Decode steps between the stages of a prefill pass, so that a long pass delays no token for long.

While the model builds a pass, the evaluation of some layers at a time is started. The device gets
stages and decode steps in turn. On accelerators, it computes a stage while the host delivers the
tokens of the step before, launches the next step and builds the next layers::

    device   | step |  stage  | step |  stage  | step |   flush   | step |
    host       build | read, launch, build | read, launch, flush | read, launch, checkpoints

If the host takes longer than the device, a step's tokens exist before the host has built the next
stage. Then the host reads them, and launches the next step, before it launches that stage, which
takes milliseconds. So tokens are sent earlier at the end of a pass and at the beginning of the
next.

On accelerators, a step also follows the last stage. If kernels write the pages, their flush is
launched while that step is in flight. Otherwise the step is read first. Another step runs while the
host leaves checkpoints. If the device is faster than the host, and giving rows to prompts took
long, there is one before the first stage too.

Stages change no number: they only decide when the operations of a pass run.

Rows that decode do not join the pass itself. They would get one token per pass, and a pass takes at
least the time of one chunk, because chunk ends decide results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from kvd.worker.cache.model_cache import Start
from kvd.worker.core.batch import Batch
from kvd.worker.core.rates import Rates
from kvd.worker.device import on_cpu
from kvd.worker.engine import ignore_phase
from kvd.worker.serving.runner import Row

STAGE_SECONDS = 0.008
"""Seconds of a stage, about. Shorter ones would delay first tokens more."""
EARLY_SECONDS = STAGE_SECONDS / 2
"""Age of the step in flight, in seconds, from which one more step runs before a pass. The host
needs about as long again to build the first stage."""
STAGE_STEPS = 2.0
"""Decode steps that a stage takes at least as long as: prompts get two thirds of the time."""
GPU_STAGE_STEPS = 4.0
"""Replaces `STAGE_STEPS` on accelerators, where the host also needs the time of a step to launch
it, and builds no layers meanwhile."""
MEASURED_PASSES = 8
"""On accelerators, a decode step is measured before one of this many passes, because the device has
nothing to do until the first stage is built."""
MORE_ROWS = 1.5
"""A step is measured earlier if it has more than this many times the rows of the last measured one.
Not after every change, because the rows change with every pass while the prompts of a burst end."""
SOON_SECONDS = 0.0005
"""If a step that was launched after a stage is read and takes less time than this, the device is
faster than the host. A read that takes longer shows the opposite."""
SMALLEST_SHARE = 1 / 24
"""Part of a pass in a stage, at least. A row commits a page every 64 steps, and may commit only one
during a pass. The shares are rounded down to whole layers: a pass has at most 47 stages, and 50
steps with `MORE_STEPS`."""
MORE_STEPS = 3
"""Decode steps of a pass besides one for each stage: one before the first stage, one after the last
stage, and one after the flush."""
RECENT_PASSES = 16
"""Recent passes. On accelerators, the shortest of them is the least time that a pass is expected to
take: the host takes about as long to launch few tokens as many."""


class Interleaving:
    """The decode steps of one engine during prefill.

    ``deliver``: sends the reports that the batch has, because the pass may take long.
    """

    def __init__(self, batch: Batch, rates: Rates, deliver: Callable[[], None]) -> None:
        self._batch = batch
        self._rates = rates
        self._deliver = deliver
        self._decoding: Sequence[str] = ()
        self._steps = 0
        """Number of the pass's decode steps that were not measured: `end` subtracts their usual
        time."""
        self._passes: deque[float] = deque(maxlen=RECENT_PASSES)
        """Seconds of the newest passes, without their decode steps."""
        self._step_seconds = 0.0
        """Measured seconds of the pass's decode steps."""
        self._measured_rows = 0
        """Rows of the newest step that was measured."""
        self._unmeasured = 0
        """Passes since that step."""
        self._reads_soon = False
        """Whether the device has computed a stage before the host has built the next one, as far as
        is known."""
        self._is_behind = False
        """Whether the step in flight was launched after a stage, so that a read waits for both."""

    def begin(self, decoding: Sequence[str]) -> None:
        """Note the requests that decode during the next pass."""
        self._decoding = decoding
        # The step in flight is a part of the pass if the device is slower than the host.
        self._steps = int(self._batch.in_flight and not self._reads_soon)
        self._step_seconds = 0.0
        self._is_behind = False

    def stage_share(self, tokens: int) -> float:
        """Return the part of a pass over this many tokens that one stage computes at most.

        If rows decode, write the pages that they commit meanwhile, since no flush is possible then.
        If the device is faster than the host, and the step in flight was launched at least
        `EARLY_SECONDS` ago, also read it and launch the next one.
        """
        if not self._rates.is_measured("prefill"):
            return 1.0
        whole = self._rates.seconds("prefill", tokens)
        if not on_cpu():
            whole = max(whole, min(self._passes, default=0.0))
        if whole <= STAGE_SECONDS:
            return 1.0
        rows = self._rows(self._decoding)
        if not rows:
            return 1.0
        self._measure_step(len(rows))
        steps = STAGE_STEPS if on_cpu() else GPU_STAGE_STEPS
        seconds = max(STAGE_SECONDS, steps * self._rates.seconds("decode", 1))
        share = min(1.0, max(SMALLEST_SHARE, seconds / whole))
        cache = self._batch.cache
        if cache.needs_flush(rows, len(cache.stage_ends(share)) + MORE_STEPS):
            self._batch.synchronize()
            cache.flush()
        if self._reads_soon and time.monotonic() - self._batch.step_began_at >= EARLY_SECONDS:
            self._turn()  # the host took this long to give rows to prompts
        return share

    def _measure_step(self, rows: int) -> None:
        """Wait for the step in flight, and note how long it took. On the CPU, deliver its tokens.

        While prompts are read without a pause, no other decode step is measured. Stages would
        depend on a step of fewer rows, and the rows that decode now would delay prompts for longer.
        """
        if not self._batch.in_flight:
            return
        self._unmeasured += 1
        is_like_last = rows <= MORE_ROWS * self._measured_rows
        if not on_cpu() and is_like_last and self._unmeasured < MEASURED_PASSES:
            return
        self._measured_rows, self._unmeasured = rows, 0
        start = time.monotonic()
        self._batch.synchronize()
        end = time.monotonic()
        self._step_seconds += end - start
        self._steps = 0
        # If the host is slower than the device, `decode` took about as long as a step.
        seconds = max(end - self._batch.step_began_at, self._batch.decode_seconds)
        self._rates.note("decode", 1, seconds)
        if on_cpu():
            self.settle()  # otherwise its tokens would wait for the first stage

    def end(self, seconds: float) -> float:
        """Note how long a pass took; return its seconds without the decode steps."""
        seconds -= self._step_seconds + self._rates.seconds("decode", self._steps)
        self._passes.append(seconds)
        return seconds

    @property
    def has_rows(self) -> bool:
        """Whether rows decode during the pass."""
        return bool(self._rows(self._decoding))

    def settle(self) -> None:
        """Wait for the step in flight, read it, and deliver its tokens."""
        self._batch.finish_step()
        self._deliver()

    def run_stage(self, left: int, start: Start) -> None:
        """Start a stage, and run a decode step before it if `_reads_soon`, otherwise after it.

        On accelerators, a step also follows the last stage. ``left``: stages after this one.
        """
        soon = self._reads_soon
        if soon:
            self.run_step(1)
        start()
        if not soon:
            self.run_step(left or not on_cpu(), timed=left > 0)
        elif not left:
            self._turn(timed=False)
        self._is_behind = not soon

    def pass_written(self) -> None:
        """Launch a decode step after a pass, because the host now leaves checkpoints."""
        if self.has_rows and not on_cpu():
            # The host leaves checkpoints while this step is in flight: its time is not measured.
            self._turn(timed=False)

    def _turn(self, *, timed: bool = True) -> None:
        """Deliver the tokens of the step in flight, and launch the next one.

        The read shows nothing about the device: it may wait for the flush, or come too early.
        """
        self.settle()
        began = time.monotonic()
        self._launch_step(timed=timed)
        self._step_seconds += time.monotonic() - began

    def run_step(self, left: int, *, timed: bool = True) -> None:
        """Deliver the tokens of the step in flight. ``left``: whether to launch the next one.

        ``timed``: see `Batch.decode`.
        """
        began, soon = time.monotonic(), self._reads_soon and not self._is_behind
        if self._batch.in_flight:
            self._batch.synchronize()
            is_over = time.monotonic() - began < SOON_SECONDS
            if self._is_behind or not is_over:
                self._reads_soon = is_over and not on_cpu()
        self.settle()
        if left:
            self._launch_step(timed=timed)
        if soon:  # otherwise the read may have waited for a stage
            self._step_seconds += time.monotonic() - began
        else:
            self._steps += self._batch.in_flight

    def _launch_step(self, *, timed: bool) -> None:
        # A pass is one phase: each change of the phase is a message to the daemon.
        enter_phase, self._batch.enter_phase = self._batch.enter_phase, ignore_phase
        self._is_behind = False
        try:
            able = [rid for rid in self._decoding if self._may_decode(rid)]
            self._batch.decode(able, timed=timed)
        finally:
            self._batch.enter_phase = enter_phase

    def _may_decode(self, rid: str) -> bool:
        """Return whether a request can decode a token without a flush or more memory."""
        if rid not in self._batch.requests:
            return False
        scheduled = self._batch.scheduler.find(rid)
        if scheduled.suspended or scheduled.stalled:
            return False
        return not self._batch.cache.needs_flush(self._rows([rid]))

    def _rows(self, rids: Sequence[str]) -> list[Row]:
        requests = self._batch.requests
        live = (one for rid in rids if rid in requests for one in requests[rid].live)
        return [one.row for one in live if one.row is not None]
