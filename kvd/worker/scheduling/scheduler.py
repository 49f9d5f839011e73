"""Chooses the requests that a step admits, prefills and decodes. No tensors, no clock.

A request is queued, prefilling, decoding or preempted (`states`). It can be finished in any state.
It can be suspended while it prefills or decodes: then it keeps its rows and memory and gets no
tokens. A step has three parts::

    admit     from the queue: first come, first served, with priorities that age      `queue`
              The head is never overtaken by a request that needs less.
    decode    one token for each choice of the decoding requests
    prefill   chunks of one or more prompts                                   `prefill_order`
              A chunk that two prompts share is prefilled once.               `shared_prompts`

Decode and prefill share the step's **budget** of tokens. Decoded and prefilled tokens never exceed
it. The budget has room for one chunk in addition to all rows, so decode and prefill never wait for
each other. Further chunks use what decoding leaves of the budget.

**Longest wait** of a request that is never preempted:

* until admission: the unfinished work that arrived before it, plus the later work that the bound of
  `queue` allows;
* then until its prompt is prefilled: 2 S steps of ``budget`` tokens, which include the tokens that
  other requests decode. S counts its own chunks and those of the requests ahead of it
  (`prefill_order`).

The chunks of a prompt of 300 tokens, with C = 128. The last prompt token, d, is not prefilled: it
is the first decode input::

    0         128         256     299 300
    |--chunk---|--chunk----|-chunk-|d|
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvd.worker.scheduling.growth import Growth, MissingPages, value_of
from kvd.worker.scheduling.prefill_order import MustEndPass, PrefillOrder, never_end
from kvd.worker.scheduling.queue import RequestQueue
from kvd.worker.scheduling.request import (
    Chunk,
    ReservationSizes,
    ScheduledRequest,
)
from kvd.worker.scheduling.shared_prompts import shares_next_chunk, without_waiting
from kvd.worker.scheduling.states import RequestStates
from protocol.costs import RESERVED_TOKENS
from protocol.errors import InvalidRequest, LocalProtocolError

__all__ = ["AGE", "Chunk", "Plan", "ReservationSizes", "Scheduler"]

AGE = 65_536
"""Tokens of later work that one priority step is worth: about the work of thirty requests."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests to admit, prefill and decode in the next step."""

    admitted: tuple[str, ...]
    """Requests that just left the queue, in order. They also appear in the fields below."""
    group: tuple[Chunk, ...]
    """Chunks of one prefill pass. Those of one request follow each other."""
    decode: tuple[str, ...]
    """Requests that decode: one token for each of their running choices."""
    missing_pages: int
    """Pages that ``growing`` lacks, or else the head of the queue. 0 if only rows are lacking."""
    queue_missing_pages: int = 0
    """Pages lacking for all growth, for the head and for as many requests as there are free rows.
    """
    resumed: tuple[str, ...] = ()
    """The requests of ``admitted`` that were preempted before."""
    growing: str | None = None
    """The most valuable request whose reservation could not be extended."""


class Scheduler:
    """Call `plan`, run it, call `mark_prefilled` for each chunk and `finish` for ended requests.

    ``max_rows``: rows for running choices. ``chunk``: the grid of prefill chunks, in tokens.
    ``sizes``: pages that requests fill. ``budget``: decoded and prefilled tokens of a step;
    the default is one chunk plus all rows. ``decode_budget``: those of a step in which rows decode,
    if they are fewer. ``group``: whether the engine can prefill several
    chunks in one pass (`prefill_order`). ``age``: see `queue`. ``ahead``: see `growth`.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        chunk: int,
        sizes: ReservationSizes | None = None,
        budget: int | None = None,
        decode_budget: int | None = None,
        group: bool = False,
        age: int = AGE,
        ahead: int = RESERVED_TOKENS,
    ) -> None:
        budget = chunk + max_rows if budget is None else budget
        if max_rows < 1 or chunk < 1 or age < 1:
            raise LocalProtocolError(
                f"max_rows {max_rows}, chunk {chunk} and age {age} must be positive"
            )
        least = budget if decode_budget is None else min(budget, decode_budget)
        if least < chunk + max_rows:
            raise LocalProtocolError(
                f"a step's budget of {least} tokens has no room for a chunk of {chunk} tokens and"
                f" {max_rows} decoding rows: it must be at least {chunk + max_rows}"
            )
        self._max_rows = max_rows
        self._chunk = chunk
        self.sizes = sizes or ReservationSizes()
        self.start_level = 0
        """Level at which new requests start, unless they are too large for it."""
        self._queue = RequestQueue(age)
        self.states = RequestStates(self._queue)
        self.growth = Growth(self.states, self.sizes, ahead)
        self._prefill_order = PrefillOrder(
            chunk=chunk, budget=budget, group=group, decode_budget=decode_budget
        )
        self.must_end_pass: MustEndPass = never_end
        """Whether a request's chunks in a pass must end at a position."""
        self._decoding = 0
        """Tokens that the planned step decodes."""
        self._planned: dict[str, list[Chunk]] = {}
        """Chunks that `mark_prefilled` accepts, in this order."""
        self._pass_counted = True
        """Whether `PrefillOrder.pass_done` was called for the planned pass."""

    # Counts.

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def queue(self) -> tuple[str, ...]:
        return tuple(request.rid for request in self._queue)

    @property
    def head(self) -> ScheduledRequest | None:
        return self._queue.head

    @property
    def prefilling(self) -> int:
        """Admitted requests whose prompt is not fully prefilled."""
        return len(self.states.prefilling)

    @property
    def decoding(self) -> int:
        """Requests whose prompt is prefilled, suspended ones included."""
        return len(self.states.decoding)

    @property
    def reserved_rows(self) -> int:
        return self.states.rows

    @property
    def reserved_pages(self) -> int:
        """Worst-case pages of admitted requests, plus the pages that preempted requests keep."""
        return self.states.reserved_pages

    @property
    def cache_candidates(self) -> tuple[str, ...]:
        """Requests that may start ahead of the prefill order if the prefix cache has a hit.

        They are in queue order (see `skip_to`). Excludes suspended requests, and requests that
        will find more in the cache once another prompt is prefilled.
        """
        able = self._able_to_prefill()
        started = [request for request in able if request.prompt_started] + self._reading
        return tuple(
            request.rid
            for request in able
            if not request.prompt_started and not shares_next_chunk(request, started, self._chunk)
        )

    def find(self, rid: str) -> ScheduledRequest:
        """Return a request in any state, to be read only."""
        return self.states.find(rid)

    def is_admitted(self, rid: str) -> bool:
        return self.states.is_admitted(self.find(rid))

    # Requests.

    def submit(
        self,
        rid: str,
        prompt_len: int,
        max_new: int,
        *,
        priority: int = 0,
        deadline: float | None = None,
        choices: int = 1,
        path: tuple[Hashable, ...] = (),
        open_ended: bool = False,
        generated: int = 0,
    ) -> None:
        """Queue a request. ``deadline`` is an absolute time in seconds (see `expired`).

        ``open_ended``: whether the first reservation is all that must fit into the budget, instead
        of ``max_new``. ``generated``: tokens that an earlier worker generated. ``path``: see
        `ScheduledRequest`. Raises `InvalidRequest` for more choices than ``max_rows``.
        """
        if rid in self.states.requests:
            raise LocalProtocolError(f"request {rid} is scheduled already")
        if prompt_len < 1 or max_new < 1 or choices < 1:
            raise LocalProtocolError(
                f"request {rid}: prompt_len {prompt_len}, max_new {max_new} and choices {choices}"
                " must be positive"
            )
        if choices > self._max_rows:
            raise InvalidRequest(
                f"n is {choices}, but at most {self._max_rows} completions run at once: lower n or"
                " raise max_rows",
                field="n",
            )
        promised = self.promised(max_new, open_ended=open_ended)
        key = self._queue.new_key(prompt_len + choices * promised, priority)
        request = ScheduledRequest(
            rid,
            prompt_len,
            max_new,
            key,
            priority,
            deadline,
            choices,
            promised,
            generated=generated,
            path=path,
        )
        self._choose_level(request)
        self.states.add(request)

    def promised(self, max_new: int, *, open_ended: bool) -> int:
        """Return `ScheduledRequest.promised_new`."""
        return min(max_new, self.growth.ahead) if open_ended else max_new

    def finish(self, rid: str) -> None:
        self.states.remove(self.find(rid))
        self._planned.pop(rid, None)

    def expired(self, now: float) -> list[str]:
        """Return the requests in any state whose deadline has passed, the earliest first."""
        late = [
            (request.deadline, request.queue_key, request.rid)
            for request in self.states.requests.values()
            if request.deadline is not None and request.deadline <= now
        ]
        return [rid for _, _, rid in sorted(late)]

    @property
    def next_deadline(self) -> float | None:
        requests = self.states.requests.values()
        return min((one.deadline for one in requests if one.deadline is not None), default=None)

    # Precision levels.

    def set_start_level(self, level: int, too_large: Callable[[int, int], bool]) -> None:
        """Set the level at which all requests start that were never admitted.

        A request that is too large for this level starts lower. ``too_large(pages, rows)``:
        whether this many exceed the whole budget.
        """
        self.start_level, self.growth.too_large = level, too_large
        for request in self._queue:
            if not request.was_admitted:
                self._choose_level(request)

    def _choose_level(self, request: ScheduledRequest) -> None:
        for level in range(self.start_level, self.sizes.levels):
            fits = self.growth.fits(request, request.promised_new, level)
            if level == self.sizes.lowest_level or fits:
                request.level, request.reserved_new = level, 0
                self.growth.extend(request)
                return

    def step_down(self, rid: str, level: int) -> None:
        """Note that all pages of a request are at this level now.

        Other requests can no longer share its prompt.
        """
        request = self.find(rid)
        request.path = ()
        self.states.resize(request, level, *self._sizes_of(request, level))

    def step_down_savings(self, rid: str, level: int) -> int:
        """Return the pages that `step_down` would free for an admitted request."""
        request = self.find(rid)
        first, further = self._sizes_of(request, level)
        return request.pages - first - (request.choices - 1) * further

    def _sizes_of(self, request: ScheduledRequest, level: int) -> tuple[int, int]:
        return self.growth.sizes_of(request, request.reserved_new, level)

    # A step.

    def plan(self, missing_pages: MissingPages | None) -> Plan:
        """Extend reservations, admit requests as memory and rows allow, and choose what runs.

        ``missing_pages(pages, rows)`` returns the pages that the grant lacks to reserve this many;
        0 or less means that they fit. With None, nothing more is reserved.
        """
        grown = self.growth.grow(missing_pages)
        admitted: list[str] = []
        resumed: list[str] = []
        missing, queue_missing = grown.missing_pages, 0
        if missing_pages and grown.lacking is not None:
            queue_missing = self._queue_missing(missing_pages, grown.pages)
        while missing_pages and grown.lacking is None and (head := self._queue.head) is not None:
            rows = self.reserved_rows + head.choices
            if rows > self._max_rows:
                break
            ahead = self.growth.pages_ahead
            pages = self.reserved_pages + ahead + head.missing_pages
            missing = max(0, missing_pages(pages, rows))
            if missing:
                queue_missing = self._queue_missing(missing_pages, ahead)
                break
            if ahead:
                self.growth.extend_all()
            if head.was_admitted:
                resumed.append(head.rid)
            elif head.level:
                head.path = ()  # below level 0 a request neither leaves nor uses checkpoints
            self.states.admit(head)
            admitted.append(head.rid)
        decode = {
            rid: one
            for rid, one in self.states.decoding.items()
            if not (one.suspended or one.stalled)
        }
        self._decoding = sum(one.choices for one in decode.values())
        growing = None if grown.lacking is None else grown.lacking.rid
        return Plan(
            tuple(admitted),
            self.next_group(),
            tuple(decode),
            missing,
            queue_missing,
            tuple(resumed),
            growing,
        )

    def _queue_missing(self, missing_pages: MissingPages, ahead: int) -> int:
        pages, rows = self.reserved_pages + ahead, self.reserved_rows
        for request in itertools.islice(self._queue, self._max_rows):
            if rows + request.choices > self._max_rows:
                break
            pages += request.missing_pages
            rows += request.choices
        return missing_pages(pages, rows)

    def next_group(self) -> tuple[Chunk, ...]:
        """Choose the chunks of the next prefill pass. Call it again after `skip_to`.

        Repeated calls without a change of state return the same chunks.
        """
        group = self._prefill_order.choose(
            self._able_to_prefill(), self._decoding, self.must_end_pass
        )
        self._planned = {}
        for chunk in group:
            self._planned.setdefault(chunk.rid, []).append(chunk)
        self._pass_counted = False
        return group

    def _able_to_prefill(self) -> list[ScheduledRequest]:
        requests = [one for one in self.states.prefilling.values() if not one.suspended]
        return without_waiting(requests + self._reading, self._chunk)

    @property
    def has_begun_prompts(self) -> bool:
        """Whether a request in prefill was looked up in the prefix cache, or ran a chunk."""
        return any(one.prompt_started for one in self.states.prefilling.values())

    @property
    def _reading(self) -> list[ScheduledRequest]:
        return [request for request in self.states.admitted if request.reads_prompt]

    def skip_to(self, rid: str, position: int) -> None:
        """Count a prompt's first tokens as prefilled: the engine found them in the prefix cache.

        Allowed before the request's first chunk, to a position on the grid. Call `next_group`
        afterwards.
        """
        request = self.states.prefilling.get(rid)
        if request is None or request.prompt_started:
            raise LocalProtocolError(f"request {rid} is not about to start its prompt")
        if position < 0 or position % self._chunk or position > request.prefill_end:
            raise LocalProtocolError(
                f"request {rid}: {position} is not a chunk end within {request.prefill_end} tokens"
            )
        self._planned.pop(rid, None)
        request.prompt_started = True
        self.states.advance(request, position)

    def note_generated(self, rid: str, generated: int) -> None:
        """Note that a choice of a decoding request has run this many decode steps."""
        request = self.find(rid)
        request.generated = max(request.generated, generated)

    def mark_prefilled(self, rid: str, end: int) -> None:
        """Note that a planned chunk ran, to ``end``. A pass's first chunk also counts the pass."""
        planned = self._planned.get(rid, [])
        if not planned or planned[0].end != end:
            raise LocalProtocolError(
                f"request {rid}: no chunk to {end} was planned (planned: {planned})"
            )
        del planned[0]
        if not self._pass_counted:
            self._prefill_order.pass_done()
            self._pass_counted = True
        request = self.states.prefilling[rid]
        request.prompt_started = True
        self.states.advance(request, end)

    # Preemption.

    def victims(self) -> list[str]:
        """Return the admitted requests in preemption order: low priority, then late arrival."""
        return [request.rid for request in sorted(self.states.admitted, key=value_of)]

    def suspend(self, rid: str, *, reads_prompt: bool = False) -> None:
        """Give an admitted request no tokens until `resume`. It keeps its rows and memory.

        ``reads_prompt``: see `ScheduledRequest.reads_prompt`.
        """
        self.states.set_suspended(rid, True)
        self.find(rid).reads_prompt = reads_prompt
        self._planned.pop(rid, None)

    def resume(self, rid: str) -> None:
        self.states.set_suspended(rid, False)

    def preempt(self, rid: str, kept_pages: int = 0) -> None:
        """Free a request's rows and pages; it keeps its progress and ``kept_pages``."""
        self.states.preempt(rid, kept_pages)
        self.growth.extend(self.find(rid))
        self._planned.pop(rid, None)

    def restart_prefill(self, rid: str) -> None:
        """Prefill a request from the start of its prompt again: its keys and values are lost."""
        self.states.restart_prefill(self.find(rid))
        self._planned.pop(rid, None)
