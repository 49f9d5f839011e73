"""Finds the request that kills a model's process, and spares the others. Pure.

There is one `Suspects` per model. Requests enter the process, may be proven harmless by a new
token, and leave. The first rule that applies to a death decides about the requests inside:

1. The process was killed from outside: no request is suspected, and all enter again.
2. All requests had produced new tokens: none is suspected, and all enter again. Such deaths do not
   prevent progress.
3. The only request inside was suspected before: it is to blame and does not enter again.
4. Otherwise the requests without a new token are suspected. If other requests produced tokens, the
   suspects are tried without them first; if not, in halves. A request is tried last if it waited
   in the worker's queue when the process first died with it. So a long queue does not delay
   running requests.

While groups wait for their trial, one group is inside. The next one joins when each request inside
has produced a new token, which clears it, or has ended. Requests that arrive meanwhile wait until
no group is left. So between two deaths either a token is produced, or the group on trial becomes
smaller. At most ``3 + log2(n)`` deaths after the last token, the process dies with a single request
inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_LINES = 20
"""Maximum deaths in a story; the newest are kept."""


class Suspects(msgspec.Struct):
    """The requests of one model, as possible causes of its process's death."""

    inside: dict[str, bool] = msgspec.field(default_factory=dict)
    """Requests that the process has, and whether each produced a new token in it."""
    groups: list[list[str]] = msgspec.field(default_factory=list)
    """Requests to try together, in the order of the trials."""
    stories: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """For each suspect, the deaths that it was in since its last new token."""
    queued: set[str] = msgspec.field(default_factory=set)
    """Requests inside that waited in the worker's queue according to its last report."""
    careful: bool = False
    """Whether only the group on trial may enter."""

    @property
    def trying(self) -> bool:
        """Whether some request inside has not produced a new token yet."""
        return not all(self.inside.values())

    def next_group(self) -> list[str]:
        """Return the group to try next; empty if none is left, which ends `careful`.

        Call only while `careful` and not `trying`.
        """
        if self.groups:
            return self.groups.pop(0)
        self.careful = False
        return []

    def enter(self, rid: str) -> None:
        self.inside[rid] = False

    def note_queued(self, rid: str) -> None:
        if rid in self.inside:
            self.queued.add(rid)

    def note_progress(self, rid: str) -> None:
        self.queued.discard(rid)
        if rid in self.inside:
            self.inside[rid] = True
            self.stories.pop(rid, None)

    def note_returned(self, rid: str) -> None:
        """Note that the process never got a request."""
        self.inside.pop(rid, None)
        self.queued.discard(rid)

    def forget(self, rid: str) -> None:
        self.note_returned(rid)
        self.stories.pop(rid, None)
        remaining = ([it for it in group if it != rid] for group in self.groups)
        self.groups = [group for group in remaining if group]

    def note_death(
        self, present: Collection[str], how: str, *, attributable: bool
    ) -> list[str] | None:
        """Note that the process died with the requests ``present``.

        Returns the story of the request to blame, or None. A request to blame is the only one in
        ``present``. Requests that are not to blame wait to enter again.
        """
        dead = {rid: self.inside.pop(rid) for rid in list(self.inside) if rid in present}
        unproven = [rid for rid, proven in dead.items() if not proven]
        proven = [rid for rid in dead if dead[rid]]
        queued = [rid for rid in unproven if rid in self.queued and rid not in self.stories]
        self.queued.difference_update(dead)
        if not (attributable and unproven):  # (1), (2)
            if self.careful and dead:
                self.groups.insert(0, list(dead))
            return None
        line = f"{how}; {len(dead)} inside, {len(unproven)} without a new token"
        for rid in unproven:
            self.stories[rid] = [*self.stories.get(rid, []), line][-MAX_LINES:]
        if len(dead) == 1 and len(self.stories[unproven[0]]) > 1:  # (3)
            return self.stories.pop(unproven[0])
        self.careful = True  # (4)
        if not proven and len(queued) == len(unproven):
            queued = []
        suspects = [rid for rid in unproven if rid not in queued]
        half = len(suspects) if proven else -(-len(suspects) // 2)
        parts = (suspects[:half], suspects[half:], proven, queued)
        self.groups[:0] = [part for part in parts if part]
        return None

    def check(self) -> None:
        waiting = [rid for group in self.groups for rid in group]
        assert all(self.groups), "an empty group"
        assert len(waiting) == len(set(waiting)), "a request in two groups"
        assert not set(waiting) & set(self.inside), "a request inside and waiting for its trial"
        assert self.queued <= self.inside.keys(), "queued in a process that does not have it"
        assert self.careful or not self.groups, "groups without careful trials"
        assert not any(self.inside.get(rid, False) for rid in self.stories), "proven and suspected"
