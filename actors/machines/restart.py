"""When a process that died is started again, and when it is given up. Pure.

An *attributable* death is one that the process may have caused itself; a kill from outside is
not. Of those with requests inside, the requests are suspected first (`actors.machines.suspects`),
so such a death counts only once one of them is blamed. Progress (a generated token) wipes the
slate.
"""

from __future__ import annotations

import msgspec

FORGET_S = 600.0
"""After ten quiet minutes a death is a first death again: the delay starts small."""


class RestartBudget(msgspec.Struct):
    """Three attributable deaths within a minute, without progress between them, are enough.

    Deaths in the load, hangs and requests that were blamed count however far they lie apart: a
    model whose load takes a minute and then crashes, or that hangs for two, would be loaded for
    ever.
    """

    most: int = 3
    period_s: float = 60.0
    delay_s: float = 0.5
    """Before the first restart; it doubles with each death."""
    longest_delay_s: float = 30.0
    deaths: list[float] = msgspec.field(default_factory=list)
    fruitless: int = 0
    """Attributable deaths in the load, hangs, and requests that were blamed."""
    crashed: list[float] = msgspec.field(default_factory=list)
    """When the other attributable deaths were."""

    def death(self, now: float, *, attributable: bool, fruitless: bool) -> float | None:
        """Count a death; return the delay before the next start, or None to give up."""
        self.deaths = [at for at in self.deaths if now - at < FORGET_S] + [now]
        self.crashed = [at for at in self.crashed if now - at < self.period_s]
        if attributable and fruitless:
            self.fruitless += 1
        elif attributable:
            self.crashed.append(now)
        if attributable and self.crashes >= self.most:
            return None
        return float(min(self.delay_s * 2 ** (len(self.deaths) - 1), self.longest_delay_s))

    def narrowed(self) -> float:
        """Return the delay after a death that makes the suspects fewer: there are not many."""
        return self.delay_s

    def blame(self) -> bool:
        """Count a request that was blamed for deaths; return whether to give up."""
        self.fruitless += 1
        return self.crashes >= self.most

    @property
    def crashes(self) -> int:
        """Attributable deaths that count now."""
        return self.fruitless + len(self.crashed)

    def progress(self) -> None:
        """Forget all deaths: it works."""
        if self.deaths or self.fruitless:
            self.deaths, self.crashed, self.fruitless = [], [], 0

    def check(self) -> None:
        """Check the invariants."""
        assert self.crashes <= self.most, "given up, and still counting"
        assert self.deaths == sorted(self.deaths), "time went backwards"
