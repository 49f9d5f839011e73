"""Whether a step's tokens are read before or after the next forward pass is launched.

On accelerators the thread that launches passes also waits for tokens: with CUDA, MLX captures
streams in a mode in which no other thread may wait for an event or allocate. Masks can only be
computed once the tokens are read.

If the device takes longer to compute a pass than the host to launch one, the next pass must be
launched first. Otherwise the device is idle meanwhile. If the launch takes longer, the tokens are
ready before it. Reading them first then costs little, and if the masks are ready as well, pass and
draw are launched together.
"""

from __future__ import annotations

from statistics import median

TRIAL = 16
"""Steps for which each order is tried."""
PERIOD = 512
"""Steps between two trials."""


class ReadOrder:
    """Tries both orders, and takes the one whose steps take less time.

    It compares the times that depend on the order: waits for tokens and masks, and the launch of a
    draw apart from its pass. The rest of a step is the same work in both.
    """

    def __init__(self) -> None:
        self.reads_first = False
        """Whether the next step reads tokens before it launches a pass."""
        self._spent: dict[bool, list[float]] = {False: [], True: []}
        """Seconds that the last steps with each order have spent."""
        self._settled = 0
        """Steps since the last trial."""

    def note(self, seconds: float) -> None:
        """Note what a step has spent."""
        spent = self._spent[self.reads_first]
        if len(spent) < TRIAL:
            spent.append(seconds)
            if len(spent) == TRIAL:
                self._end_trial()
            return
        self._settled += 1
        if self._settled >= PERIOD - 2 * TRIAL:
            self._settled = 0
            self._spent = {False: [], True: []}

    def _end_trial(self) -> None:
        """Try the other order, or choose if both were tried."""
        if len(self._spent[not self.reads_first]) < TRIAL:
            self.reads_first = not self.reads_first
        else:
            self.reads_first = median(self._spent[True]) < median(self._spent[False])
