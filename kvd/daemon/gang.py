"""Decides how the ranks of one worker end, and which exit explains the others. Pure.

A worker is one process, or a gang of several ranks. No rank can continue without the others, so the
first exit ends all of them. A rank's own watchdog often ends it first, because another rank is
gone. Such an exit only follows another one: the daemon waits `GRACE_S` for that one before it kills
the other ranks, so that a kill from outside is not taken for its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from signal import SIGKILL

from protocol.gang import PEER_LOST

GRACE_S = 1.0
"""Seconds between an exit that only follows another one, and the kill of the other ranks."""


@dataclass(frozen=True)
class RankExit:
    """The exit of one rank."""

    rank: int
    returncode: int
    """Exit status; a negative number is the signal that ended the process, as in `subprocess`."""
    by_daemon: bool
    """Whether the daemon's SIGKILL ended the process."""

    @property
    def follows(self) -> bool:
        """Whether another rank's exit or an order of the daemon explains this one.

        A follower exits with 0 when the leader ends the connection to it.
        """
        left = self.returncode == PEER_LOST or (self.returncode == 0 and self.rank > 0)
        return left or self.by_daemon


@dataclass
class Gang:
    """The ranks of one worker that live, and the exits of the others."""

    ranks: int
    exits: list[RankExit] = field(default_factory=list)
    """In the order in which they were observed."""
    killed: set[int] = field(default_factory=set)
    """Ranks that the daemon killed while they lived."""
    deadline: float | None = None
    """When to call `time_out`."""

    @property
    def alive(self) -> set[int]:
        return set(range(self.ranks)) - {it.rank for it in self.exits}

    def exited(self, rank: int, returncode: int, now: float) -> list[int]:
        """Record an exit; return the ranks to kill."""
        assert rank in self.alive, f"rank {rank} exits twice"
        end = RankExit(rank, returncode, returncode == -SIGKILL and rank in self.killed)
        self.exits.append(end)
        if not self.alive:
            self.deadline = None
        elif not end.follows:
            return self.kill()
        elif self.deadline is None and self.alive - self.killed:
            self.deadline = now + GRACE_S
        return []

    def time_out(self, now: float) -> list[int]:
        """Return the ranks to kill once the deadline has passed."""
        return [] if self.deadline is None or now < self.deadline else self.kill()

    def kill(self) -> list[int]:
        """Return the ranks to kill, which is every rank that lives."""
        self.deadline = None
        self.killed |= self.alive
        return sorted(self.alive)

    @property
    def cause(self) -> RankExit:
        """The exit that explains the end of the worker, once no rank lives."""
        assert not self.alive, "the end of a worker whose ranks live"
        return next((it for it in self.exits if not it.follows), self.exits[0])
