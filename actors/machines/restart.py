"""When a process that died is started again, and when its model is given up. Pure.

An *attributable* death is one that the process may have caused itself; a kill from outside is not.
If the process had requests, they are suspected first (`actors.machines.suspects`): such a death
counts only once a request is blamed for it. A generated token resets the restart budget.
"""

from __future__ import annotations

import msgspec

FORGET_S = 600.0
"""Seconds after which a death no longer lengthens the restart delay."""


class RestartBudget(msgspec.Struct):
    """Gives a model up after three attributable deaths without a generated token in between.

    Plain crashes count for `period_s`. Deaths during the load, hangs and blamed requests count
    until a token is generated: a model that takes a minute to load and then crashes would otherwise
    be loaded again and again.
    """

    limit: int = 3
    period_s: float = 60.0
    delay_s: float = 0.5
    """Seconds before the first restart. Doubles with each death."""
    max_delay_s: float = 30.0
    deaths: list[float] = msgspec.field(default_factory=list)
    fruitless: int = 0
    """Attributable deaths during the load, hangs, and blamed requests."""
    crashed: list[float] = msgspec.field(default_factory=list)
    """Times of the other attributable deaths."""

    def count_death(self, now: float, *, attributable: bool, fruitless: bool) -> float | None:
        """Count a death; return the delay before the next start, or None to give up."""
        self.deaths = [at for at in self.deaths if now - at < FORGET_S] + [now]
        self.crashed = [at for at in self.crashed if now - at < self.period_s]
        if attributable and fruitless:
            self.fruitless += 1
        elif attributable:
            self.crashed.append(now)
        if attributable and self.crashes >= self.limit:
            return None
        return float(min(self.delay_s * 2 ** (len(self.deaths) - 1), self.max_delay_s))

    def count_blame(self) -> bool:
        """Count a request that was blamed for deaths; return whether to give up."""
        self.fruitless += 1
        return self.crashes >= self.limit

    @property
    def crashes(self) -> int:
        """Attributable deaths that count now."""
        return self.fruitless + len(self.crashed)

    def reset(self) -> None:
        self.deaths, self.crashed, self.fruitless = [], [], 0

    def check(self) -> None:
        assert self.crashes <= self.limit, "more deaths than the limit"
        assert self.deaths == sorted(self.deaths), "deaths out of order"
