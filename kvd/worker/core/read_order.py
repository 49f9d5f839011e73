"""Whether a step's tokens are read before or after the next forward pass is launched.

On accelerators the thread that launches passes also waits for tokens: with CUDA, MLX captures
streams in a mode in which no other thread may wait for an event or allocate. Masks can only be
computed once the tokens are read.

If the device takes longer to compute a pass than the host to launch one, the next pass must be
launched first. Otherwise the device is idle meanwhile. If the launch takes longer, the tokens are
ready before it. Reading them first then lets threads compute the masks during the launch.
"""

from __future__ import annotations

from statistics import median

TRIAL = 16
"""Steps for which each order is tried."""
PERIOD = 512
"""Steps between two trials."""


class ReadOrder:
    """Tries both orders, and takes the one whose steps wait less for tokens and masks.

    The rest of a step is the same work in both, so the one with shorter waits has shorter steps.
    """

    def __init__(self) -> None:
        self.reads_first = False
        """Whether the next step reads tokens before it launches a pass."""
        self._waits: dict[bool, list[float]] = {False: [], True: []}
        """Seconds that the last steps with each order have waited."""
        self._settled = 0
        """Steps since the last trial."""

    def note(self, seconds: float) -> None:
        """Note how long a step has waited for tokens and masks together."""
        waits = self._waits[self.reads_first]
        if len(waits) < TRIAL:
            waits.append(seconds)
            if len(waits) == TRIAL:
                self._end_trial()
            return
        self._settled += 1
        if self._settled >= PERIOD - 2 * TRIAL:
            self._settled = 0
            self._waits = {False: [], True: []}

    def _end_trial(self) -> None:
        """Try the other order, or choose if both were tried."""
        if len(self._waits[not self.reads_first]) < TRIAL:
            self.reads_first = not self.reads_first
        else:
            self.reads_first = median(self._waits[True]) < median(self._waits[False])
