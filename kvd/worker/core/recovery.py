"""Bringing rows back to where they were, after a step that could not be finished.

A pass over prompts that failed is taken back: a chunk changes nothing before it is written. What
any other step has left of tails and states is not known, and what it holds may be what is missing.
So all of it is thrown away, and each row gets again what it was given: its prompt in the same
cuts, then its tokens, one a step, with the other rows. The same passes give the same keys and
values, so nobody notices but by the time that it takes. Checkpoints of prompts save most of the
reading; they go as soon as the rows have taken their pages.

Rows that had been stepped down come back on their level, as if they had begun there. Does not
cover when this is done, and who fails where it does not help (`setbacks`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import mlx.core as mx

from kvd.worker.core.request import Completion, Request
from kvd.worker.engine import OnPhase
from kvd.worker.prefix.cache import PrefixCache
from kvd.worker.prefix.tree import Hit
from kvd.worker.process.shortage import attempt
from kvd.worker.scheduling.scheduler import Scheduler
from kvd.worker.serving.runner import Row, Runner

Join = Callable[[Request, Completion, Row], None]


@dataclass(eq=False)
class _Lost:
    """A prompt as far as it was read, and those who went on from there."""

    request: Request
    read: int
    """Tokens of the prompt."""
    completions: list[Completion]
    """None of them: the prompt is not through."""
    known: int = 0
    """How many of the tokens a checkpoint had."""
    rows: list[Row] = field(default_factory=list)
    """As they come back: one for each completion, or the one that the prompt is read into."""

    def fed(self) -> list[tuple[Row, list[int]]]:
        """Return the rows, each with the tokens that its decode steps were given."""
        last = self.request.prompt[-1]
        found = []
        for row, completion in zip(self.rows, self.completions, strict=False):
            tokens = completion.tokens
            found.append((row, [last, *tokens][: len(tokens)]))
        return found


class Recovery:
    """The rows of one engine; ``chunk`` is the grid that prompts are cut on."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        prefix_cache: PrefixCache,
        chunk: int,
        on_phase: OnPhase,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._prefix_cache = prefix_cache
        self._chunk = chunk
        self._on_phase = on_phase

    def take_back(self, requests: Collection[Request], drain: Callable[[], None]) -> bool:
        """Forget the pass over prompts that failed, and make room; return whether that is all.

        All rows are as they were then, and what is in flight goes on.
        """
        if not self._runner.cache.undo_prefill():
            return False
        for request in requests:
            if request.row and request.row.length != self._scheduler.find(request.rid).prefilled:
                return False  # another pass of the same step had gone through
        return attempt(self._give_up_spare, requests, drain) is None

    def _give_up_spare(self, requests: Collection[Request], drain: Callable[[], None]) -> None:
        self._prefix_cache.clear(request.tracked for request in requests)
        drain()
        gc.collect()  # a traceback's frames hold what the step has built, until somebody looks
        self._runner.cache.compact()
        mx.clear_cache()

    def clear(self, requests: Collection[Request], *, late: bool) -> None:
        """Free all rows, and what is in flight with them; frozen ones stay, and checkpoints.

        After a ``late`` shortage these go too: nothing that was written can be trusted.
        """
        cache = self._runner.cache
        for request in requests:
            request.row = None
            for completion in request.completions:
                if completion.row is not None:
                    completion.launched = len(completion.tokens)
                completion.row = None
        if late:
            self._prefix_cache.clear(request.tracked for request in requests)
            holders: list[Request | Completion] = [*requests]
            holders += [one for request in requests for one in request.completions]
            for holder in [one for one in holders if one.snapshot is not None]:
                cache.snapshots.drop(holder.snapshot)
                holder.snapshot = None
                if isinstance(holder, Completion):
                    holder.launched = len(holder.tokens)
        gc.collect()
        cache.discard()
        mx.clear_cache()

    def bring_back(self, requests: Collection[Request], join: Join) -> None:
        """Give all rows back that `clear` has taken; ``join`` lets one decode again."""
        lost = [one for one in map(self._lost, requests) if one is not None]
        for one in lost:
            self._begin(one)
        self._prefix_cache.clear(request.tracked for request in requests)
        self._runner.cache.compact()
        for one in lost:
            self._read(one)
        self._decode([pair for one in lost for pair in one.fed()])
        for one in lost:
            if self._scheduler.is_admitted(one.request.rid):
                self._hand_over(one, join)
            else:
                self._snapshot(one)

    def _lost(self, request: Request) -> _Lost | None:
        """Return what a request lacks of what it had; None: nothing."""
        if request.saved is not None:
            return None
        if request.begun:
            away = [one for one in request.live if one.snapshot is None]
            return _Lost(request, len(request.prompt) - 1, away) if away else None
        if request.snapshot is not None or not self._scheduler.find(request.rid).prompt_started:
            return None
        return _Lost(request, self._scheduler.find(request.rid).prefilled, [])

    def _begin(self, one: _Lost) -> None:
        self._on_phase("pools")
        cache = self._runner.cache
        # A checkpoint's pages are of the top level; who runs below has reserved less.
        hit = Hit(0) if one.request.level else self._find(one)
        one.known = hit.tokens
        one.rows = [cache.restore(hit.snapshot) if hit.tokens else cache.new_row(one.request.level)]

    def _find(self, one: _Lost) -> Hit:
        return self._prefix_cache.peek(one.request.prompt[: one.read + 1], one.request.salt)

    def _read(self, one: _Lost) -> None:
        cache, row = self._runner.cache, one.rows[0]
        for start in range(one.known, one.read, self._chunk):
            self._on_phase("prefill")
            end = min(start + self._chunk, one.read)
            self._runner.prefill(row, one.request.prompt[start:end])
        others = one.completions[1:]
        if others:
            snapshot = cache.snapshots.take(row)
            one.rows += [cache.restore(snapshot) for _ in others]
            cache.snapshots.drop(snapshot)

    def _decode(self, fed: list[tuple[Row, list[int]]]) -> None:
        cache = self._runner.cache
        for step in range(max((len(tokens) for _, tokens in fed), default=0)):
            now = [(row, tokens[step]) for row, tokens in fed if step < len(tokens)]
            rows = [row for row, _ in now]
            if cache.needs_flush(rows):
                self._on_phase("flush")
                cache.flush()
            self._on_phase("decode")
            logits = self._runner.decode(rows, mx.array([token for _, token in now], mx.int32))
            mx.eval(logits, cache.arrays())

    def _hand_over(self, one: _Lost, join: Join) -> None:
        if one.request.begun:
            for completion, row in zip(one.completions, one.rows, strict=True):
                join(one.request, completion, row)
        else:
            one.request.row = one.rows[0]

    def _snapshot(self, one: _Lost) -> None:
        """Let a request that was parked be parked again."""
        cache = self._runner.cache
        holders: list[Request | Completion] = [*one.completions] or [one.request]
        for holder, row in zip(holders, one.rows, strict=True):
            holder.snapshot = cache.snapshots.take(row)
            cache.free(row)
