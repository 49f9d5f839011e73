"""Measures how fast this process computes, writes and reads.

The rates decide whether a preempted row is swapped or recomputed, and whether a prompt is read or
prefilled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Work = Literal["prefill", "decode", "write", "read_swapped", "read", "read_from_disk"]
"""``prefill`` and ``decode`` count tokens of one row; the others count bytes.

``read_swapped``: files of swapped rows. ``read``: segments almost all of which the system's page
cache holds. ``read_from_disk``: the bytes of other segments that it does not hold."""

_NEWEST_WEIGHT = 0.2
_RECOVERY = 0.05
_FORGET_AFTER = 20
"""Calls of `Rates.recover` after which a failure's rate may be forgotten."""
_LEAST = 1e-3
"""The lowest rate after a failure, as a part of the initial one."""
_INITIAL: dict[Work, float] = {
    "prefill": 1000.0,
    "decode": 50.0,
    "write": 5e8,
    "read_swapped": 1e9,
    "read": 1e9,
    "read_from_disk": 1e9,
}
"""Rates per second that apply before the first measurement."""


@dataclass
class Rates:
    """Running means of amounts per second."""

    _measured: dict[Work, float] = field(default_factory=dict)
    _failed: dict[Work, int] = field(default_factory=dict)
    """Calls of `recover` since the last failure, of work whose rate is from a failure."""

    def note(self, work: Work, amount: float, seconds: float) -> None:
        """Add a measurement; one without an amount or a duration is ignored."""
        if amount <= 0 or seconds <= 0:
            return
        self._failed.pop(work, None)
        newest = amount / seconds
        mean = self._measured.get(work, newest)
        self._measured[work] = mean + _NEWEST_WEIGHT * (newest - mean)

    def note_failure(self, work: Work, amount: float, seconds: float) -> None:
        """Lower a rate to this one: work that takes as long is not worth it."""
        self._failed[work] = 0
        initial = _INITIAL[work]
        newest = max(amount / seconds if seconds > 0 else 0.0, initial * _LEAST)
        self._measured[work] = min(self._measured.get(work, initial), newest)

    def recover(self, work: Work) -> None:
        """Raise a rate towards its initial value, because no work is done that would correct it.

        Each call takes 5 % of the way, on a logarithmic scale: a disk that was slow once is tried
        again soon, and one that stays slow is tried by few prompts. After `_FORGET_AFTER` calls, a
        failure's rate of at least half the initial one counts as not measured, because the real
        rate may be far above the initial one.
        """
        initial = _INITIAL[work]
        if (mean := self._measured.get(work)) is None:
            return
        self._measured[work] = mean = mean * max(1.0, initial / mean) ** _RECOVERY
        if work in self._failed:
            self._failed[work] += 1
            if self._failed[work] >= _FORGET_AFTER and mean >= initial / 2:
                del self._measured[work], self._failed[work]

    def is_measured(self, work: Work) -> bool:
        """Whether a rate is not the initial one."""
        return work in self._measured

    def seconds(self, work: Work, amount: float) -> float:
        """Return how long this much work takes."""
        return amount / self._measured.get(work, _INITIAL[work])

    def swap_seconds(self, nbytes: int) -> float:
        return self.seconds("write", nbytes) + self.seconds("read_swapped", nbytes)

    def recompute_seconds(self, prompt_tokens: int, generated_tokens: int) -> float:
        return self.seconds("prefill", prompt_tokens) + self.seconds("decode", generated_tokens)
