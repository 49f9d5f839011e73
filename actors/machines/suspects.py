"""Who of a model's requests may have ended its process: poison is told from bad luck. Pure.

One for each model. Requests go in (`enter`), prove themselves with a new token (`gained`), and
leave. When the process dies (`died`), what becomes of those inside:

1. it was killed from outside: nobody is suspected, all go in again as they were;
2. all had made new tokens: the same, for an end that takes so long is met by going on;
3. the only one inside was suspected before: it is to blame, and is not tried again;
4. else those without a new token are suspected. If others had made some, the suspects are tried
   apart from them first; if not, in halves. Who is in it for the first time, and was in the
   worker's queue when last heard of, comes last: a long queue does not hold up those who run.

While groups wait to be tried, one is inside at a time; the next one joins it when each of its
requests has made a new token, which ends the suspicion, or is over. Who has come since waits until
no group is left. So between two deaths somebody makes a token, or the suspects become fewer:
at most ``3 + log2(n)`` deaths after the last token a request is found that dies alone.

Does not cover: starting the process again, and when to give it up (`actors.machines.lifecycle`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

MOST_LINES = 20
"""Of a story: its newest deaths."""


class Suspects(msgspec.Struct):
    """The requests of one model, as far as its process may die of them."""

    inside: dict[str, bool] = msgspec.field(default_factory=dict)
    """Given to the process; whether they have made a new token since."""
    groups: list[list[str]] = msgspec.field(default_factory=list)
    """To be tried, in this order."""
    stories: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Of those suspected: the deaths that they were in since their last new token."""
    queued: set[str] = msgspec.field(default_factory=set)
    """Inside, and waiting in the worker's queue when last heard of."""
    careful: bool = False
    """Nobody goes in but the group that is tried."""

    @property
    def trying(self) -> bool:
        """Whether somebody inside has not made a new token yet."""
        return not all(self.inside.values())

    def next_group(self) -> list[str]:
        """Return who is tried next; with nobody left, all may go in again.

        Ask while `careful`, and not while `trying`.
        """
        if self.groups:
            return self.groups.pop(0)
        self.careful = False
        return []

    def enter(self, rid: str) -> None:
        """Note that a request is given to the process."""
        self.inside[rid] = False

    def lined_up(self, rid: str) -> None:
        """Note that a request waits in the worker's queue."""
        if rid in self.inside:
            self.queued.add(rid)

    def gained(self, rid: str) -> None:
        """Note a new token of a request."""
        self.queued.discard(rid)
        if rid in self.inside:
            self.inside[rid] = True
            self.stories.pop(rid, None)

    def bounced(self, rid: str) -> None:
        """Note that the process never got a request."""
        self.inside.pop(rid, None)
        self.queued.discard(rid)

    def over(self, rid: str) -> None:
        """Forget a request, wherever it is."""
        self.inside.pop(rid, None)
        self.queued.discard(rid)
        self.stories.pop(rid, None)
        for group in self.groups:
            if rid in group:
                group.remove(rid)
        self.groups = [group for group in self.groups if group]

    def died(self, present: Collection[str], how: str, *, attributable: bool) -> list[str] | None:
        """Note that the process died with these in it; return the story of the one to blame.

        That one is the only one of ``present``. All others wait to go in again.
        """
        were = {rid: self.inside.pop(rid) for rid in list(self.inside) if rid in present}
        unproven = [rid for rid, proven in were.items() if not proven]
        idle = [rid for rid in unproven if rid in self.queued and rid not in self.stories]
        self.queued.difference_update(were)
        if not (attributable and unproven):  # (1), (2)
            if self.careful and were:
                self.groups.insert(0, list(were))
            return None
        for rid in unproven:
            self._tell(rid, f"{how}; {len(were)} inside, {len(unproven)} without a new token")
        if len(were) == 1 and len(self.stories[unproven[0]]) > 1:  # (3)
            return self.stories.pop(unproven[0])
        self.careful = True
        rest = [rid for rid in were if were[rid]]
        if not rest and len(idle) == len(unproven):
            idle = []
        first = [rid for rid in unproven if rid not in idle]  # (4)
        half = len(first) if rest else -(-len(first) // 2)
        self.groups[:0] = [part for part in (first[:half], first[half:], rest, idle) if part]
        return None

    def _tell(self, rid: str, line: str) -> None:
        self.stories[rid] = [*self.stories.get(rid, []), line][-MOST_LINES:]

    def check(self) -> None:
        """Check the invariants."""
        waiting = [rid for group in self.groups for rid in group]
        assert all(self.groups), "an empty group"
        assert len(waiting) == len(set(waiting)), "a request in two groups"
        assert not set(waiting) & set(self.inside), "a request that is tried, and waits for it"
        assert self.queued <= self.inside.keys(), "in the queue of no process"
        assert self.careful or not self.groups, "groups that nobody heeds"
        assert not any(self.inside.get(rid, False) for rid in self.stories), "proven, and suspected"
