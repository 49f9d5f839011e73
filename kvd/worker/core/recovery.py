"""Rebuilds rows after a step that ran out of memory.

A prefill pass that failed can be undone: a chunk changes nothing before it is written. The effect
of any other failed step on tails and states is unknown, and the rows may hold the memory that is
missing. So all rows are discarded, and each gets the same input again: its prompt in the same
chunks, then its tokens, one per step, next to the other rows. That gives the same keys and values,
so clients see only the delay. Checkpoints save most of the prefill; they are dropped as
soon as the rows share their pages.

Rows that were stepped down are rebuilt at their precision level, as if they had started there.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import mlx.core as mx

from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.core.batch import Batch
from kvd.worker.core.request import Completion, Request
from kvd.worker.core.row_copies import copies
from kvd.worker.prefix.tree import Hit
from kvd.worker.process.shortage import attempt
from kvd.worker.scheduling.prefill_order import LONGEST_TAIL
from kvd.worker.serving.runner import Row
from kvd.worker.serving.step_inputs import StepInputs


@dataclass(eq=False)
class _Rebuild:
    """What a request lost: the rows of ``prefilled`` prompt tokens and of ``completions``."""

    request: Request
    prefilled: int
    completions: list[Completion]
    """Empty if the prompt is still in prefill."""
    cached: int = 0
    """Prompt tokens that the new row got from a checkpoint."""
    rows: list[Row] = field(default_factory=list)
    """The new rows: one for each completion, or the one with the unfinished prompt."""

    def inputs(self) -> list[tuple[Row, list[int]]]:
        """Return each row with the input tokens of its decode steps."""
        last = self.request.prompt[-1]
        return [
            (row, [last, *completion.tokens][: len(completion.tokens)])
            for row, completion in zip(self.rows, self.completions, strict=False)
        ]


class Recovery:
    """Rebuilds the rows of one engine; ``chunk`` is the prefill chunk in tokens."""

    def __init__(self, batch: Batch, chunk: int) -> None:
        self._batch = batch
        self._scheduler = batch.scheduler
        self._cache = batch.cache
        self._prefix_cache = batch.prefix_cache
        self._chunk = chunk
        self._enter_phase = batch.enter_phase

    def undo_prefill(self) -> bool:
        """Undo a failed prefill pass; return whether the step in flight can continue."""
        if not self._cache.undo_prefill():
            return False
        for request in self._batch.requests.values():
            if request.row and request.row.length != self._scheduler.find(request.rid).prefilled:
                return False  # an earlier pass of the same step had succeeded
        return attempt(self._free_spare) is None

    def _free_spare(self) -> None:
        self._drop_checkpoints()
        self._batch.synchronize()
        gc.collect()  # frames of the traceback hold arrays of the failed step
        self._cache.compact()
        mx.clear_cache()

    def _drop_checkpoints(self) -> None:
        self._prefix_cache.clear(request.tracked for request in self._batch.requests.values())

    def discard(self, *, late: bool) -> None:
        """Free all rows; snapshots and checkpoints stay.

        ``late``: whether results in flight were lost (`Shortage.in_flight_lost`). Then snapshots
        and checkpoints are freed too, since no write of the step can be trusted.
        """
        self._batch.discard_rows(late=late)
        if late:
            self._drop_checkpoints()
        gc.collect()
        self._cache.discard()
        mx.clear_cache()

    def rebuild(self) -> None:
        """Give all rows back that `discard` has freed."""
        found = [self._find(request) for request in self._batch.requests.values()]
        rebuilds = [rebuild for rebuild in found if rebuild is not None]
        for rebuild in rebuilds:
            self._open_row(rebuild)
        self._drop_checkpoints()
        self._cache.compact()
        self._prefill([chunk for rebuild in rebuilds for chunk in self._chunks(rebuild)])
        for rebuild in rebuilds:
            self._fork(rebuild)
        self._decode([pair for rebuild in rebuilds for pair in rebuild.inputs()])
        for rebuild in rebuilds:
            self._batch.put_back(rebuild.request, rebuild.completions, rebuild.rows)

    def _find(self, request: Request) -> _Rebuild | None:
        if request.swapped is not None:
            return None
        if request.begun:
            lost = [completion for completion in request.live if completion.snapshot is None]
            return _Rebuild(request, len(request.prompt) - 1, lost) if lost else None
        if request.snapshot is not None or not self._scheduler.find(request.rid).prompt_started:
            return None
        return _Rebuild(request, self._scheduler.find(request.rid).prefilled, [])

    def _open_row(self, rebuild: _Rebuild) -> None:
        self._enter_phase("pools")
        request, hit = rebuild.request, Hit(0)
        # A checkpoint's pages are at level 0; requests at lower levels have reserved less memory.
        if not request.level:
            tokens = request.prompt[: rebuild.prefilled + 1]
            hit = self._prefix_cache.peek(tokens, request.tracked.salt)
        rebuild.cached = hit.tokens
        rebuild.rows = [self._batch.new_row(request, hit)]

    def _chunks(self, rebuild: _Rebuild) -> list[tuple[Row, list[int]]]:
        prompt, end = rebuild.request.prompt, rebuild.prefilled
        starts = range(rebuild.cached, end, self._chunk)
        spans = [prompt[start : min(start + self._chunk, end)] for start in starts]
        return [(rebuild.rows[0], span.tolist()) for span in spans]

    def _prefill(self, chunks: list[tuple[Row, list[int]]]) -> None:
        """Prefill chunks of all rows, as many in a pass as its memory is charged for."""
        runner = self._batch.runner
        while chunks:
            count, room = 0, runner.pass_tokens(self._chunk)
            tails = room + LONGEST_TAIL
            row: Row = None
            for other, chunk in chunks:
                # As in `PrefillOrder.choose`: also together with the tails before them.
                tail = 0 if other is row else other.length - PAGE_TOKENS * full_pages(other.length)
                room, tails = room - len(chunk), tails - len(chunk) - tail
                if count and (min(room, tails) < 0 or not runner.packs):
                    break
                count, row = count + 1, other
            some, chunks = chunks[:count], chunks[count:]
            self._enter_phase("prefill")
            runner.prefill_pass([row for row, _ in some], [chunk for _, chunk in some])

    def _fork(self, rebuild: _Rebuild) -> None:
        """Give each of several completions a row."""
        others = rebuild.completions[1:]
        if others:
            rebuild.rows += copies(self._cache, rebuild.rows[0], len(others))

    def _decode(self, inputs: list[tuple[Row, list[int]]]) -> None:
        cache = self._cache
        for step in range(max((len(tokens) for _, tokens in inputs), default=0)):
            now = [(row, tokens[step]) for row, tokens in inputs if step < len(tokens)]
            rows = [row for row, _ in now]
            if cache.needs_flush(rows):
                self._enter_phase("flush")
                cache.flush()
            self._enter_phase("decode")
            known = [token for _, token in now]
            logits = self._batch.runner.launch(rows, StepInputs.of(known))
            mx.eval(logits, cache.arrays())
