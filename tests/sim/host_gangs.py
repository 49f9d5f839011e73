"""A design of gangs over several hosts, as two pure machines; no daemon has it yet.

`HostLedger` is a host's part: reservations are fixed for the life of a gang, and wait in order.
`Coordinator` is the part of the daemon that loads the model. It asks the hosts one after another,
in the order of their names, so gangs that need the same hosts cannot wait for each other. Ranks
start only when every host has reserved, and each is a child of its own host's daemon. The
connection is the lease: when it ends, the host ends its rank and forgets the reservation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Answer = Literal["reserved", "refused"]


@dataclass
class HostLedger:
    """Reservations on one host, in bytes. A gang has another name in each attempt to load it."""

    budget: int
    reserved: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    """By gang, in the order in which they asked."""

    def ask(self, gang: str, nbytes: int) -> list[tuple[str, Answer]]:
        """Queue a gang's request; return the gangs to answer now."""
        if nbytes > self.budget:
            return [(gang, "refused")]
        self.waiting[gang] = nbytes
        return self._grant()

    def leave(self, gang: str) -> list[tuple[str, Answer]]:
        """Forget a gang, once its rank has exited; return the gangs to answer now."""
        self.waiting.pop(gang, None)
        self.reserved.pop(gang, None)
        return self._grant()

    def _grant(self) -> list[tuple[str, Answer]]:
        answers: list[tuple[str, Answer]] = []
        for gang, nbytes in list(self.waiting.items()):
            if sum(self.reserved.values()) + nbytes > self.budget:
                break  # later requests do not overtake the first one
            self.reserved[gang] = self.waiting.pop(gang)
            answers.append((gang, "reserved"))
        return answers


@dataclass
class Coordinator:
    """One gang's load. Methods return the hosts to send a command to."""

    needs: dict[str, int]
    """Bytes of the rank on each host."""
    asked: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    state: Literal["idle", "asking", "running", "refused"] = "idle"

    def start(self) -> list[str]:
        """Begin to ask; return the host to ask."""
        assert self.state in {"idle", "refused"}
        self.state, self.asked, self.held = "asking", [], set()
        return self._ask_next()

    def answered(self, host: str, answer: Answer) -> tuple[list[str], list[str]]:
        """Return the hosts to ask, and those to leave."""
        if self.state != "asking" or host in self.held or host not in self.asked:
            return [], []  # an answer to an attempt that is over
        if answer == "refused":
            return [], self._end("refused")
        self.held.add(host)
        if len(self.held) < len(self.needs):
            return self._ask_next(), []
        self.state = "running"
        return [], []

    def lost(self, host: str) -> list[str]:
        """End the attempt or the gang, because a host or its rank is gone; return those to leave.

        Without an effect on a gang that has not asked the host.
        """
        return self._end("idle") if host in self.asked else []

    def stop(self) -> list[str]:
        """End the gang; return the hosts to leave."""
        return self._end("idle")

    def _ask_next(self) -> list[str]:
        host = sorted(self.needs)[len(self.asked)]
        self.asked.append(host)
        return [host]

    def _end(self, state: Literal["idle", "refused"]) -> list[str]:
        leave, self.asked, self.held, self.state = self.asked, [], set(), state
        return leave
