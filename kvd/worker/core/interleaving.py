"""Decode steps between the stages of a prefill pass, so that a long pass delays no token for long.

A pass is built once, and evaluated in stages of some of its layers. The device gets stages and
decode steps in turn. While it computes a stage, the host delivers the tokens of the step before::

    device   | step | stage | step | stage | step | stage, flush |
    host        pass |  read, launch |  read, launch |  read

Stages change no number: they only decide when the operations of a pass run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvd.worker.core.batch import Batch
from kvd.worker.core.rates import Rates
from kvd.worker.engine import ignore_phase
from kvd.worker.serving.runner import Row, on_cpu

STAGE_SECONDS = 0.008
"""Seconds of a stage, about. Shorter ones would delay first tokens more."""
STAGE_STEPS = 2.0
"""Decode steps that a stage takes at least as long as: prompts get two thirds of the time."""
SMALLEST_SHARE = 1 / 32
"""Part of a pass in a stage, at least. A row commits a page every 64 steps, and may commit only one
during a pass. The shares are rounded down to whole layers."""


class Interleaving:
    """The decode steps of one engine during prefill.

    ``deliver``: sends the reports that the batch has, because the pass may take long.
    """

    def __init__(self, batch: Batch, rates: Rates, deliver: Callable[[], None]) -> None:
        self._batch = batch
        self._rates = rates
        self._deliver = deliver
        self._decoding: Sequence[str] = ()
        self._launched = 0.0
        """When the step in flight was launched, in seconds (`time.monotonic`)."""
        self._steps = 0
        """Decode steps of the pass."""
        self._waited = 0.0
        """Seconds that the pass waited for the step in flight before its first stage."""

    def begin(self, decoding: Sequence[str], launched: float) -> None:
        """Note the requests that decode during the next pass.

        ``launched``: when the step in flight was launched, in seconds (`time.monotonic`).
        """
        self._decoding = decoding
        self._launched = launched
        self._steps = 0
        self._waited = 0.0

    def stage_share(self, tokens: int) -> float:
        """Return the part of a pass over this many tokens that one stage computes at most.

        If rows decode, write the pages that they commit meanwhile, since no flush is possible then.
        """
        # Accelerators compute a pass in few milliseconds, and would have less to do at once.
        if not (on_cpu() and self._rates.is_measured("prefill")):
            return 1.0
        whole = self._rates.seconds("prefill", tokens)
        if whole <= STAGE_SECONDS or not self._rows(self._decoding):
            return 1.0
        self._measure_step()
        seconds = max(STAGE_SECONDS, STAGE_STEPS * self._rates.seconds("decode", 1))
        share = min(1.0, max(SMALLEST_SHARE, seconds / whole))
        cache = self._batch.cache
        if cache.needs_flush(self._rows(self._decoding), len(cache.stage_ends(share))):
            self._batch.synchronize()
            cache.flush()
        return share

    def _measure_step(self) -> None:
        """Wait for the step in flight, and note how long it took.

        While prompts are read without a pause, no other decode step is measured. Stages would
        depend on a step of fewer rows, and the rows that decode now would delay prompts for longer.
        """
        if not self._batch.in_flight:
            return
        start = time.monotonic()
        self._batch.synchronize()
        end = time.monotonic()
        self._waited = end - start
        self._rates.note("decode", 1, end - self._launched)

    @property
    def step_seconds(self) -> float:
        """About how long decode steps delayed the pass, in seconds."""
        return self._waited + self._rates.seconds("decode", self._steps)

    def settle(self) -> None:
        """Wait for the step in flight, read it, and deliver its tokens."""
        self._batch.finish_step()
        self._deliver()

    def run_step(self, left: int) -> None:
        """Deliver the tokens of the step in flight; launch the next one if stages are ``left``."""
        self.settle()
        if not left:
            return
        # A pass is one phase: each change of the phase is a message to the daemon.
        enter_phase, self._batch.enter_phase = self._batch.enter_phase, ignore_phase
        try:
            self._batch.decode([rid for rid in self._decoding if self._may_decode(rid)])
        finally:
            self._batch.enter_phase = enter_phase
        self._steps += self._batch.in_flight

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
