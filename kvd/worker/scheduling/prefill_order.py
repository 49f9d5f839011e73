"""Which request's prompt is prefilled next, and which requests share its forward pass.

**Lead.** Requests stand in queue order. Every second pass is led by the first request. The passes
between are *express* passes. Their lead is the request with the fewest prompt tokens left among
those of the highest priority. An express lead has at most half of what the first request has left,
and no lower priority than the first. If there is none, the first request leads that pass too.
A long prompt L ahead of short prompts s and t::

    regular       L     L     L     L     L  L  L  L
    express       s     s     t     t                 s and t do not wait for L, nor L for them

Prompts of similar length run one after the other. Each finishes as early as possible, and the
second one finds a shared prefix in the cache.

**Bounds.** The first request is never passed over twice in a row. A request is therefore prefilled
after at most 2 S passes, where S counts its own chunks and those of the requests ahead of it.
A prompt of s tokens behind one long prompt waits for less than 2 s + 2 C tokens of that prompt.
While both share the passes, it waits for about as many tokens as its own; otherwise the long prompt
has less than twice as much left.

**Groups.** If the engine supports it, requests whose chunk is their last run in one forward pass
with the lead, under three conditions:

* padded to the longest chunk, the group fits into what decoding leaves of the step's budget;
* padding is at most a quarter of the group;
* dense keys and values (the chunks, and the tails before them) take no more than those of a single
  chunk of that size may take. The memory reserved for one prefill therefore also holds a group.

**Chunk ends** lie on the absolute grid of C tokens, or at the prompt's end. A chunk attends exactly
to its own keys and to quantized keys before it. A chunk end that moved with the load would change
the result.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.scheduling.request import Chunk, ScheduledRequest

EXPRESS_RATIO = 2
"""An express lead has at most one in this many of the tokens that the first request has left."""
PADDING_RATIO = 4
"""At most one in this many tokens of a group is padding."""
LONGEST_TAIL = 2 * PAGE_TOKENS - 1
"""Tokens before a chunk that are not in a page, at most."""


class PrefillOrder:
    """Chooses single chunks or groups. ``chunk``: the grid in tokens; ``budget``: tokens a step."""

    def __init__(self, *, chunk: int, budget: int, group: bool) -> None:
        self._chunk = chunk
        self._budget = budget
        self._group = group
        self._express = False

    def choose(self, requests: Iterable[ScheduledRequest], decoding: int = 0) -> tuple[Chunk, ...]:
        """Return the chunks of the next pass, the lead's first.

        Every request must have prompt tokens left. ``decoding``: tokens of the step's budget that
        are already taken.
        """
        ordered = sorted(requests, key=lambda request: request.queue_key)
        if not ordered:
            return ()
        lead = self._lead(ordered)
        room = self._budget - decoding
        members = self._group_of(lead, ordered, room) if self._group else [lead]
        return tuple(Chunk(member.rid, member.prefilled, self.cut(member)) for member in members)

    def pass_done(self) -> None:
        """Note that the chosen pass ran: regular and express passes alternate."""
        self._express = not self._express

    def cut(self, request: ScheduledRequest) -> int:
        """Return where the request's next chunk ends."""
        return min((request.prefilled // self._chunk + 1) * self._chunk, request.prefill_end)

    def _lead(self, ordered: list[ScheduledRequest]) -> ScheduledRequest:
        first = ordered[0]
        if not self._express:
            return first
        short = [
            request
            for request in ordered
            if request.remaining * EXPRESS_RATIO <= first.remaining
            and request.priority >= first.priority
        ]
        return min(
            short,
            key=lambda request: (-request.priority, request.remaining, request.queue_key),
            default=first,
        )

    def _group_of(
        self, lead: ScheduledRequest, ordered: list[ScheduledRequest], room: int
    ) -> list[ScheduledRequest]:
        members = [lead]
        if not self._is_last_chunk(lead):
            return members
        for request in ordered:
            may_join = request is not lead and self._is_last_chunk(request)
            if may_join and _fit_together([*members, request], room):
                members.append(request)
        return members

    def _is_last_chunk(self, request: ScheduledRequest) -> bool:
        return self.cut(request) == request.prefill_end


def _fit_together(members: list[ScheduledRequest], room: int) -> bool:
    tokens = sum(member.remaining for member in members)
    padded = len(members) * max(member.remaining for member in members)
    tails = sum(member.prefilled - PAGE_TOKENS * full_pages(member.prefilled) for member in members)
    fits = padded <= room and tails + tokens <= room + LONGEST_TAIL
    return fits and (padded - tokens) * PADDING_RATIO <= padded
