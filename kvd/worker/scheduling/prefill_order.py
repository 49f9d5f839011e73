"""Which request's prompt is prefilled next, and which chunks share its forward pass.

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
With passes of at most P tokens, a prompt of s tokens behind one long prompt waits for less than
2 s + 2 P tokens of that prompt. If it can lead express passes, the two alternate, and it waits for
about as many tokens as it has itself. If it cannot, the long prompt has less than 2 s tokens left.

**Passes.** If the engine supports it, a pass takes as many chunks as decoding leaves room for in
the step's budget: the lead's next chunks, then those of the other requests. In an express pass, the
requests that could lead it come before the others. The rest stand in queue order. A chunk that does
not fit waits for a later pass, and a smaller one may take its room. A prompt that begins with a
chunk which the pass already has waits too. A request's chunks in a pass may have to end where it
leaves a checkpoint. Often they need not, because the checkpoint can be left after the pass: only
the last chunk follows and fills no page, or the pass keeps tails. If a pass keeps tails, it still
ends at checkpoints when it then has more tokens, of more prompts::

    room of four chunks; prompts of 1.6 chunks      ends at checkpoints    A  B  C  D
                                                    goes on behind them    A  a  B  b

Together, the chunks of a pass and the tails before them have at most the tokens of one chunk that
fills the pass with the longest tail before it. The memory reserved for the dense keys and values of
such a chunk therefore also holds those of a pass over many prompts.

**Chunk ends** are multiples of the chunk size, or the prompt's end. A chunk attends to its own keys
before they are quantized, and to pages of earlier keys, which are quantized. A chunk end that moved
with the load would therefore change the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.scheduling.request import Chunk, ScheduledRequest
from kvd.worker.scheduling.shared_prompts import shares_next_chunk

EXPRESS_RATIO = 2
"""The first request has at least this many times as many tokens left as an express lead."""
LONGEST_TAIL = 2 * PAGE_TOKENS - 1
"""Most tokens before a chunk that are not in a page."""


class MustEndPass(Protocol):
    """Returns whether a request's chunk that ends at ``end`` is its last one of the pass."""

    def __call__(self, rid: str, end: int, next_end: int, /, *, goes_on: bool) -> bool:
        """``next_end``: where its next chunk ends. ``goes_on``: whether tails may be kept."""


def never_end(_rid: str, _end: int, _next_end: int, *, goes_on: bool) -> bool:
    """Let all chunks of a request share a pass."""
    del goes_on
    return False


class PrefillOrder:
    """Chooses the chunks of passes. ``chunk``: tokens of a chunk; ``budget``: tokens per step.

    ``group``: whether a pass can have several chunks. ``decode_budget``: tokens of a step in which
    rows decode; None: ``budget``.
    """

    def __init__(
        self, *, chunk: int, budget: int, group: bool, decode_budget: int | None = None
    ) -> None:
        self._chunk = chunk
        self._budget = budget
        self._decode_budget = budget if decode_budget is None else decode_budget
        self._group = group
        self._express = False

    def choose(
        self,
        requests: Iterable[ScheduledRequest],
        decoding: int = 0,
        must_end_pass: MustEndPass = never_end,
    ) -> tuple[Chunk, ...]:
        """Return the chunks of the next pass, the lead's first.

        Every request must have prompt tokens left. ``decoding``: tokens of the step's budget that
        are already taken.
        """
        ordered = self._by_turn(sorted(requests, key=lambda request: request.queue_key))
        if not self._group:
            return tuple(
                Chunk(lead.rid, lead.prefilled, self._cut(lead, lead.prefilled))
                for lead in ordered[:1]
            )
        room = self._decode_budget - decoding if decoding else self._budget
        found = self._fill(ordered, room, must_end_pass, goes_on=True)
        if len(found) > len({chunk.rid for chunk in found}):
            ending = self._fill(ordered, room, must_end_pass, goes_on=False)
            if _tokens_of(ending) > _tokens_of(found):
                return tuple(ending)
        return tuple(found)

    def _fill(
        self,
        ordered: Sequence[ScheduledRequest],
        room: int,
        must_end_pass: MustEndPass,
        *,
        goes_on: bool,
    ) -> list[Chunk]:
        """Return the chunks of a pass of ``room`` tokens. ``goes_on``: see `MustEndPass`."""
        chunks: list[Chunk] = []
        tails = room + LONGEST_TAIL
        members: list[ScheduledRequest] = []
        for request in ordered:
            # It finds the shared chunk in the prefix cache after this pass.
            if not request.prompt_started and shares_next_chunk(request, members, self._chunk):
                continue
            members.append(request)
            tail = request.prefilled - PAGE_TOKENS * full_pages(request.prefilled)
            start = request.prefilled
            while start < request.prefill_end:
                end = self._cut(request, start)
                tokens = end - start
                if chunks and (tokens > room or tail + tokens > tails):
                    break
                room, tails, tail = room - tokens, tails - tail - tokens, 0
                chunks.append(Chunk(request.rid, start, end))
                start = end
                if start < request.prefill_end and must_end_pass(
                    request.rid, start, self._cut(request, start), goes_on=goes_on
                ):
                    break
        return chunks

    def pass_done(self) -> None:
        """Note that the chosen pass ran: regular and express passes alternate."""
        self._express = not self._express

    def _cut(self, request: ScheduledRequest, start: int) -> int:
        """Return where a request's chunk from ``start`` on ends."""
        return min((start // self._chunk + 1) * self._chunk, request.prefill_end)

    def _by_turn(self, ordered: list[ScheduledRequest]) -> list[ScheduledRequest]:
        """Return requests in the order in which they get room in this pass, the lead first."""
        if not (self._express and ordered):
            return ordered
        first = ordered[0]
        short = [
            request
            for request in ordered
            if request.remaining * EXPRESS_RATIO <= first.remaining
            and request.priority >= first.priority
        ]
        short.sort(key=lambda request: (-request.priority, request.remaining, request.queue_key))
        return short + [request for request in ordered if request not in short]


def _tokens_of(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.length for chunk in chunks)
