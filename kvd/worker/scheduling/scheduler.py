"""Which rows are admitted, prefilled and decoded in a step: integers only, no tensors, no clock.

::

    submit            plan                 prefilled              finish
    -----> waiting ---------> prefilling -------------> decoding -------->
              ^                    |                       |
              | unpark             |         park          |
              +--------- parked <--+-----------------------+

A row may be finished in any state, and paused while it prefills or decodes: then it keeps its
place and memory, and gets no tokens.

A step, and the rule of each of its parts::

    admit     the line: first come, first served, with priorities that age     `scheduling.line`
              The first is never overtaken by one that needs less.
    decode    one token for each choice of the decoding rows
    prefill   one chunk of one prompt, or the last chunks of several            `scheduling.turns`
              What another prompt is reading just now is not read beside it.    `scheduling.sharing`

Decode and prefill share the step's **budget** of tokens: what is decoded and what is prefilled,
padding included, is never more. It has room for a chunk beside all places, so neither waits for the
other; groups take what decoding leaves.

**What a request waits for** at most, if its priority is p and nobody parks it, in tokens of others'
work (a request's work is its prompt and all that it may generate):

* until it is admitted: what had arrived before it and was not over, and of what came later less
  than ``(q - p) * age + w``, q being the highest priority among these and w the work of the last
  that went before it; none if q = p;
* then until its prompt is through: 2 S steps of ``budget`` tokens, what others decode in them
  included, S being the chunks of its own prompt and of those that stand in front of it.

Prompt of 300 tokens, C = 128; the last prompt token is the row's first decode input::

    0         128         256     299 300
    |--chunk---|--chunk----|-chunk-|d|

Does not cover: which pages a row gets (`kvd.worker.cache`), whether the memory is there
(`kvd.worker.scheduling.admission`), what is drawn (`kvd.worker.sampling.sampler`), when a completion is over and when a
row is parked (the engine says so).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable

from kvd.worker.scheduling.plan import Plan
from kvd.worker.scheduling.prefill_order import PrefillOrder
from kvd.worker.scheduling.queue import Line
from kvd.worker.scheduling.row import Chunk, Row
from kvd.worker.scheduling.sharing import is_being_read, not_waiting
from kvd.worker.scheduling.sizes import Sizes
from kvd.worker.scheduling.states import States
from protocol.errors import InvalidRequest, LocalProtocolError

__all__ = ["AGE", "Chunk", "Plan", "Scheduler", "Sizes"]

AGE = 65_536
"""Tokens of later work that one step of priority is worth: a queue of some thirty requests."""


class Scheduler:
    """Call `plan`, run it, tell `prefilled` for each chunk, `finish` what is over, `plan` again.

    ``max_rows``: places, one for each choice that runs. ``chunk``: tokens of a prefill chunk, the
    grid. ``sizes``: the pages that requests fill at most. ``budget``: tokens of a step, decoded and
    prefilled ones; a chunk and one for each place unless told. ``group``: whether the engine can
    prefill several rows in a pass (`scheduling.turns`). ``age``: see `scheduling.line`.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        chunk: int,
        sizes: Sizes | None = None,
        budget: int | None = None,
        group: bool = False,
        age: int = AGE,
    ) -> None:
        budget = chunk + max_rows if budget is None else budget
        if max_rows < 1 or chunk < 1 or age < 1:
            raise LocalProtocolError(
                f"max_rows {max_rows}, chunk {chunk} and age {age} must be positive"
            )
        if budget < chunk + max_rows:
            raise LocalProtocolError(
                f"a step's budget of {budget} tokens has no room for a chunk of {chunk} beside"
                f" {max_rows} rows that decode: it must be at least {chunk + max_rows}"
            )
        self._max_rows = max_rows
        self._chunk = chunk
        self.sizes = sizes or Sizes()
        self.start_level = 0
        """Where new rows start, unless they are too large for it."""
        self._too_large: Callable[[int, int], bool] = _never
        self._line = Line(age)
        self._states = States(self._line)
        self._prefill_order = PrefillOrder(chunk=chunk, budget=budget, group=group)
        self._decoding = 0
        """Tokens that the planned step decodes."""
        self._planned: dict[str, Chunk] = {}
        """What `prefilled` may be told."""
        self._turn_over = True
        """Whether the planned group has counted as a turn."""

    # Counts.

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._line)

    @property
    def head(self) -> str | None:
        """The request that is admitted next."""
        row = self._line.head
        return None if row is None else row.rid

    @property
    def prefilling(self) -> int:
        """Admitted rows whose prompt is not through."""
        return len(self._states.prefilling)

    @property
    def decoding(self) -> int:
        """Rows whose prompt is through; unless paused, they get a token in each step."""
        return len(self._states.decoding)

    @property
    def preempted(self) -> int:
        """Rows that wait for `unpark`."""
        return len(self._states.preempted)

    @property
    def active(self) -> int:
        """Admitted rows that are not paused: a step does something for them."""
        return self.prefilling + self.decoding - self._states.paused

    @property
    def requests(self) -> int:
        """All of them."""
        return len(self._states.rows)

    @property
    def line(self) -> tuple[str, ...]:
        """The queue, from its head."""
        return tuple(row.rid for row in self._line)

    @property
    def head_pages(self) -> int:
        """Pages that the head of the queue would reserve beyond what it keeps."""
        row = self._line.head
        return 0 if row is None else row.pages - row.kept

    @property
    def kept_behind(self) -> int:
        """Pages that requests keep which wait behind the head of the queue."""
        head = self._line.head
        rows = [*self._line, *self._states.preempted.values()]
        return sum(row.kept for row in rows if row is not head)

    @property
    def places(self) -> int:
        """Places that admitted rows take: one for each choice."""
        return self._states.places

    @property
    def reserved(self) -> int:
        """Pages that admitted rows may take in the worst case, and those that parked ones keep."""
        return self._states.reserved

    @property
    def fresh(self) -> tuple[str, ...]:
        """Rows whose prompt may begin before its turn, if a part of it is cached (`skip_to`).

        In the line's order; not who is paused, nor who finds more when another one has read on.
        """
        rows = self._readers()
        reading = [row for row in rows if row.reads]
        return tuple(
            row.rid
            for row in rows
            if not row.reads and not is_being_read(row, reading, self._chunk)
        )

    def is_read(self, rid: str) -> bool:
        """Return whether a request's prompt has begun: it was looked up, or a chunk of it ran."""
        return self._states.find(rid).reads

    def has_begun(self, rid: str) -> bool:
        """Return whether a request was ever admitted, and so has something to lose."""
        return self._states.find(rid).started

    def is_admitted(self, rid: str) -> bool:
        """Return whether a request has its places: it prefills or decodes."""
        return self._states.is_admitted(self._states.find(rid))

    def position(self, rid: str) -> int:
        """Return how many tokens of a request's prompt are prefilled."""
        return self._states.find(rid).prefilled

    def footing(self, rid: str) -> tuple[int, int]:
        """Return the pages and places that a request takes while it is admitted."""
        row = self._states.find(rid)
        return row.pages, row.choices

    def is_paused(self, rid: str) -> bool:
        """Return whether a row waits for `resume`."""
        return self._states.find(rid).paused

    def reservation(self, prompt_len: int, max_new: int, choices: int = 1) -> int:
        """Return the most pages that a request can ever fill; the prompt's are shared."""
        first, more = self.sizes.of(prompt_len, max_new, 0)
        return first + (choices - 1) * more

    # A request's way.

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
    ) -> None:
        """Put a request into the queue; ``deadline`` is absolute, in seconds (`expired`).

        ``path``: a name for each beginning of whole chunks that the prompt can share with others.

        Raises `InvalidRequest` for more choices than there are places.
        """
        if rid in self._states.rows:
            raise LocalProtocolError(f"row {rid} is scheduled already")
        if prompt_len < 1 or max_new < 1 or choices < 1:
            raise LocalProtocolError(
                f"row {rid}: prompt_len {prompt_len}, max_new {max_new} and choices {choices} must"
                " be positive"
            )
        if choices > self._max_rows:
            raise InvalidRequest(
                f"n is {choices}, and at most {self._max_rows} completions run at once: lower n or"
                " raise max_rows",
                field="n",
            )
        row = Row(
            rid=rid,
            prompt_len=prompt_len,
            max_new=max_new,
            place=self._line.arrive(prompt_len + choices * max_new, priority),
            priority=priority,
            deadline=deadline,
            choices=choices,
            path=path,
        )
        self._start_at(row)
        self._states.add(row)

    # Levels of the ladder.

    def start(self, level: int, too_large: Callable[[int, int], bool]) -> None:
        """Let who has not begun start at a level, or the first below it that is not too large.

        ``too_large(pages, places)``: whether that could never be, with nobody else there.
        """
        self.start_level, self._too_large = level, too_large
        for row in self._line:
            if not row.started:
                self._start_at(row)

    def _start_at(self, row: Row) -> None:
        for level in range(self.start_level, self.sizes.levels):
            first, more = self.sizes.of(row.prompt_len, row.max_new, level)
            pages = first + (row.choices - 1) * more
            if level == self.sizes.lowest or not self._too_large(pages, row.choices):
                self._states.resize(row, level, first, more)
                return

    def level(self, rid: str) -> int:
        """Return the level that a request runs on, or will start at."""
        return self._states.find(rid).level

    def lowered(self, rid: str, level: int) -> int:
        """Note that all that a request has is on this level now; return the pages that this gives.

        What its prompt leaves is of no use to others any more.
        """
        row = self._states.find(rid)
        row.path = ()
        return self._states.resize(row, level, *self.sizes.of(row.prompt_len, row.max_new, level))

    def saving(self, rid: str, level: int) -> int:
        """Return the pages that `lowered` would give back of an admitted request."""
        row = self._states.find(rid)
        first, more = self.sizes.of(row.prompt_len, row.max_new, level)
        return row.pages - first - (row.choices - 1) * more

    def plan(self, lacking: Callable[[int, int], int] | None) -> Plan:
        """Admit from the head of the queue what memory and places allow, and choose what runs.

        ``lacking(pages, places)`` says how many pages would be missing if so many pages were
        reserved and so many places taken; none or less, and they fit. None: nobody is admitted.
        """
        admitted: list[str] = []
        restored: list[str] = []
        wanted = hoped = 0
        while lacking and (row := self._line.head) is not None and self._has_place(row):
            pages = self.reserved + row.pages - row.kept
            wanted = max(0, lacking(pages, self.places + row.choices))
            if wanted:
                hoped = self._hoped(lacking)
                break
            if row.started:
                restored.append(row.rid)
            elif row.level:
                row.path = ()  # it leaves no checkpoints, and takes none
            self._states.admit(row)
            admitted.append(row.rid)
        decode = {rid: row for rid, row in self._states.decoding.items() if not row.paused}
        self._decoding = sum(row.choices for row in decode.values())
        group = self.next_group()
        return Plan(tuple(admitted), group, tuple(decode), wanted, hoped, tuple(restored))

    def next_group(self) -> tuple[Chunk, ...]:
        """Choose anew what is prefilled, as after `skip_to`; the same until something changes."""
        group = self._prefill_order.choose(self._readers(), self._decoding)
        self._planned = {chunk.rid: chunk for chunk in group}
        self._turn_over = False
        return group

    def _readers(self) -> list[Row]:
        rows = [row for row in self._states.prefilling.values() if not row.paused]
        return not_waiting(rows, self._chunk)

    def _has_place(self, row: Row) -> bool:
        return self.places + row.choices <= self._max_rows

    def _hoped(self, lacking: Callable[[int, int], int]) -> int:
        pages, places = self.reserved, self.places
        for row in itertools.islice(self._line, self._max_rows):
            if places + row.choices > self._max_rows:
                break
            pages += row.pages - row.kept
            places += row.choices
        return lacking(pages, places)

    def skip_to(self, rid: str, position: int) -> None:
        """Take a prompt's first tokens as prefilled: the engine found them in its cache.

        Before the row's first chunk, and to a position on the grid; ask `next_group` afterwards.
        """
        row = self._states.prefilling.get(rid)
        if row is None or row.reads:
            raise LocalProtocolError(f"row {rid} is not about to begin its prompt")
        if position < 0 or position % self._chunk or position > row.prefill_end:
            raise LocalProtocolError(
                f"row {rid}: {position} is not a chunk's end within {row.prefill_end} tokens"
            )
        self._planned.pop(rid, None)
        row.reads = True
        self._states.advance(row, position)

    def prefilled(self, rid: str, end: int) -> None:
        """Note that a planned chunk ran, to ``end``; with the first of a group its turn is over."""
        chunk = self._planned.get(rid)
        if chunk is None or chunk.end != end:
            raise LocalProtocolError(f"row {rid}: no chunk to {end} was planned ({chunk})")
        del self._planned[rid]
        if not self._turn_over:
            self._prefill_order.ran()
            self._turn_over = True
        row = self._states.prefilling[rid]
        row.reads = True
        self._states.advance(row, end)

    def finish_choice(self, rid: str) -> int:
        """Note that one of a request's choices ended; return the pages that it gives back.

        The last one ends with `finish`.
        """
        return self._states.remove_choice(rid)

    def finish(self, rid: str) -> int:
        """Forget a request in whatever state; return the pages that it gives back."""
        pages = self._states.remove(self._states.find(rid))
        self._planned.pop(rid, None)
        return pages

    # Deadlines.

    def expired(self, now: float) -> list[str]:
        """Return the requests whose deadline has come, in whatever state, the earliest first."""
        late = [
            (row.deadline, row.place, row.rid)
            for row in self._states.rows.values()
            if row.deadline is not None and row.deadline <= now
        ]
        return [rid for _, _, rid in sorted(late)]

    @property
    def next_deadline(self) -> float | None:
        """When `expired` will next have something to say."""
        rows = self._states.rows.values()
        return min((row.deadline for row in rows if row.deadline is not None), default=None)

    # Preemption.

    def victims(self) -> list[str]:
        """Return the admitted rows, the least valuable first: low priority, then late arrival."""
        rows = [*self._states.prefilling.values(), *self._states.decoding.values()]
        rows.sort(key=lambda row: (row.priority, -row.place.number))
        return [row.rid for row in rows]

    def pause(self, rid: str) -> None:
        """Give an admitted row no tokens until `resume`; it keeps its place and its memory."""
        self._states.pause(rid)
        self._planned.pop(rid, None)

    def resume(self, rid: str) -> None:
        """Let a paused row go on."""
        self._states.resume(rid)

    def preempt(self, rid: str, kept: int = 0) -> int:
        """Take an admitted row out until `unpark`; return the pages that it gives back.

        It keeps its progress, and ``kept`` of its pages, if it stays in memory.
        """
        given = self._states.preempt(rid, kept)
        self._planned.pop(rid, None)
        return given

    def restart(self, rid: str) -> None:
        """Let a request read its prompt again, from its beginning: it has lost what it had."""
        self._states.restart(self._states.find(rid))
        self._planned.pop(rid, None)

    def keep(self, rid: str, kept: int) -> int:
        """Let a parked row, or one that waits after it, keep fewer pages; return those given."""
        return self._states.keep(rid, kept)

    def unpark(self, rid: str) -> None:
        """Put a parked row back into the queue, at the place of its arrival."""
        self._states.unpark(rid)

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        self._states.check()
        assert self.places <= self._max_rows
        for row in self._states.rows.values():
            assert row.left == 0 or row.prefilled % self._chunk == 0, "off the grid"
        for rid, chunk in self._planned.items():
            row = self._states.prefilling[rid]
            assert not row.paused
            assert (chunk.start, chunk.end) == (row.prefilled, self._prefill_order.cut(row))


def _never(_pages: int, _places: int) -> bool:
    return False
