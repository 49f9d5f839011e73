"""Threads that advance matchers by drawn tokens and compute their next masks.

Each thread takes the next matcher of a batch, so a slow one takes one thread only. llguidance
releases Python's lock while it advances a matcher and while it computes a mask.
"""

from __future__ import annotations

import _thread
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import length_hint
from queue import Empty, SimpleQueue
from time import monotonic, thread_time

from kvd.worker.grammar.matcher import MaskFiller, Matcher

HELPED_SECONDS = 100e-6
"""Expected CPU seconds of work for which a batch gets another thread. Waking one takes about 50 us.
With Qwen3-8B's shape on an H200, rows were late in 5 to 9 % of the steps, and with 400 us in 12 to
18 %."""

_LEAST_SECONDS = 10e-6

Work = tuple[Matcher, int | None]
"""A matcher, and the place of its token in a batch's tokens; None: only its mask is missing."""


class MaskBatch:
    """Matchers that threads advance. They are lent until `take_back`.

    ``tokens``: returns the tokens; one of the threads calls it, and it may wait.
    """

    def __init__(
        self, work: Sequence[Work], tokens: Callable[[], Sequence[int]], filler: MaskFiller
    ) -> None:
        self.seconds = sum(matcher.seconds for matcher, _ in work)
        """Expected CPU seconds: what these matchers took the last time."""
        self._tokens = tokens
        self._filler = filler
        self._known: Sequence[int] | None = None
        self._known_lock = threading.Lock()
        self._lent = {matcher for matcher, _ in work}
        self._left = iter(work)
        """Shared by the threads: taking the next one is atomic, as is counting."""
        self._counter = itertools.count(1 - len(work))
        self._advanced: SimpleQueue[Matcher] = SimpleQueue()
        self._running = threading.Lock()
        """Held until the threads are done."""
        self._running.acquire()
        self._error: BaseException | None = None
        for matcher, _ in work:
            matcher.lend()

    @property
    def taken_back(self) -> bool:
        """Whether no matcher is lent any more."""
        return not self._lent

    def lends(self, matcher: Matcher) -> bool:
        """Whether this matcher is lent by the batch."""
        return matcher in self._lent

    @property
    def unclaimed(self) -> int:
        """Matchers that no thread has begun to advance."""
        return length_hint(self._left)

    def run(self) -> None:
        """Advance matchers until none is left; any number of threads may do so."""
        for matcher, place in self._left:
            try:
                token = None if place is None else self._token(place)
                start = thread_time()
                if token is not None:
                    matcher.push_ahead(token)
                self._filler.compute(matcher)
                took = thread_time() - start
                matcher.seconds = min(took, 2 * matcher.seconds + _LEAST_SECONDS)
            except BaseException as error:  # noqa: BLE001 - the calling thread raises it
                self._error = error
            self._advanced.put(matcher)
            if next(self._counter) == 0:
                self._running.release()

    def _token(self, place: int) -> int:
        if self._known is None:
            with self._known_lock:
                if self._known is None:
                    self._known = self._tokens()
        return self._known[place]

    def wait(self, seconds: float = -1) -> bool:
        """Wait until all matchers have advanced; return whether they have.

        ``seconds``: the longest time; -1: any.
        """
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def wait_for(self, matcher: Matcher, seconds: float = -1) -> None:
        """Wait until this matcher has advanced, and take it back, whatever others of the batch do.

        ``seconds``: the longest time; -1: any. Raises as `take_back` does.
        """
        end = monotonic() + seconds
        while matcher in self._lent:
            try:
                left = None if seconds < 0 else max(0.0, end - monotonic())
                self._take(self._advanced.get(timeout=left))
            except Empty:
                break
        self._raise()

    def take_back(self) -> None:
        """Take back the matchers that have advanced.

        Raises what a thread raised while it waited for the tokens: the step has failed. An error of
        a grammar is its matcher's `Matcher.failure`.
        """
        while not self._advanced.empty():
            self._take(self._advanced.get())
        self._raise()

    def _take(self, matcher: Matcher) -> None:
        matcher.take_back()
        self._lent.remove(matcher)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class MaskThreads:
    """At most ``count`` threads, which start with the first batch."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._batches: SimpleQueue[MaskBatch | None] = SimpleQueue()
        self._started = 0

    def run(self, batch: MaskBatch, threads: int) -> None:
        """Run a batch in this many threads, as far as there are idle ones."""
        if not self._started:
            self._start()
        if not self._started:  # the limit of threads, or of memory
            batch.run()
        for _ in range(min(threads, self._started)):
            self._batches.put(batch)

    def _start(self) -> None:
        try:
            for _ in range(self._count):
                # `Thread.start` waits until the thread runs: up to 70 ms on busy processors.
                _thread.start_new_thread(_work, (self._batches,))
                self._started += 1
        except RuntimeError:
            pass
        weakref.finalize(self, _stop, self._batches, self._started)


def _work(batches: SimpleQueue[MaskBatch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.run()
        del batch  # with it, completions that have ended


def _stop(batches: SimpleQueue[MaskBatch | None], threads: int) -> None:
    for _ in range(threads):
        batches.put(None)
