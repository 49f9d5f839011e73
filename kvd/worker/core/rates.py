"""How fast this process computes, writes and reads: what decides where a parked row goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Work = Literal["prefill", "decode", "write", "read"]
"""``prefill`` and ``decode`` in tokens of one row, the others in bytes."""

_WEIGHT = 0.2
"""Of the newest measurement."""
_GUESSES: dict[Work, float] = {"prefill": 1000.0, "decode": 50.0, "write": 5e8, "read": 1e9}
"""A second, before anything was measured."""


@dataclass
class Rates:
    """Running means, a second."""

    _known: dict[Work, float] = field(default_factory=dict)

    def note(self, work: Work, amount: float, seconds: float) -> None:
        """Count a piece of work."""
        if amount <= 0 or seconds <= 0:
            return
        now = amount / seconds
        before = self._known.get(work, now)
        self._known[work] = before + _WEIGHT * (now - before)

    def seconds(self, work: Work, amount: float) -> float:
        """Return how long so much takes."""
        return amount / self._known.get(work, _GUESSES[work])

    def disk(self, nbytes: int) -> float:
        """Return how long writing and reading takes."""
        return self.seconds("write", nbytes) + self.seconds("read", nbytes)

    def recompute(self, prompt_tokens: int, made_tokens: int) -> float:
        """Return how long bringing a row back takes that keeps nothing."""
        return self.seconds("prefill", prompt_tokens) + self.seconds("decode", made_tokens)
