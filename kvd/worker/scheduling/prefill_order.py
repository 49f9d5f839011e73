"""Which request's prompt is prefilled next, and which requests share its forward pass.

**Lead.** A pass prefills the next chunk of one request, its *lead*. Requests stand in queue order.
The first request leads every second pass. The passes between are *express* passes. A request can
lead one if it has at most half as many prompt tokens left as the first request, and no lower
priority. Of these requests, the one with the highest priority leads, then the one with the fewest
tokens left. If there is none, the first request leads that pass too. With a long prompt L ahead of
short prompts s and t::

    regular       L     L     L     L     L  L  L  L
    express       s     s     t     t                 s and t do not wait for L, nor L for them

Prompts of similar length run one after the other. Each finishes as early as possible, and the
second one finds a shared prefix in the cache.

**Bounds.** The first request is never passed over twice in a row. A request is therefore prefilled
after at most 2 S passes, where S counts its own chunks and those of the requests ahead of it.
With chunks of C tokens, a prompt of s tokens behind one long prompt waits for less than 2 s + 2 C
tokens of that prompt. If it can lead express passes, the two alternate, and it waits for about as
many tokens as it has itself. If it cannot, the long prompt has less than 2 s tokens left.

**Groups.** If the engine supports it and the lead is at its last chunk, other requests that are at
their last chunk join its forward pass, under three conditions:

* padded to the longest chunk, the group fits into what decoding leaves of the step's budget;
* padding is at most a quarter of the group;
* the chunks and the tails before them have no more tokens than one chunk that fills that rest of
  the budget, and the longest tail before it. The memory reserved for the dense keys and values of
  one prefill therefore also holds those of a group.

**Chunk ends** lie on the absolute grid of C tokens, or at the prompt's end. A chunk attends to its
own keys before they are quantized, and to pages of earlier keys, which are quantized. A chunk end
that moved with the load would therefore change the result.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.scheduling.request import Chunk, ScheduledRequest

EXPRESS_RATIO = 2
"""The first request has at least this many times as many tokens left as an express lead."""
PADDING_RATIO = 4
"""At most one in this many tokens of a group is padding."""
LONGEST_TAIL = 2 * PAGE_TOKENS - 1
"""Most tokens before a chunk that are not in a page."""


class PrefillOrder:
    """Chooses single chunks or groups. ``chunk``: grid in tokens; ``budget``: tokens per step."""

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
