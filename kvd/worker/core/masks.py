"""The masks of decode steps: which tokens the grammars of their rows allow next.

A mask depends on the previous token. Threads therefore advance the matchers and compute the masks
while the device computes the logits of the step, and the step draws its tokens last.

A row whose mask is not ready by then is *late*: the step draws the other rows, and a later step
draws the late one. Until then, it takes part in no step. So no grammar delays other rows for more
than about the time of a step. The tokens of a row do not depend on when they are drawn.

MLX evaluates a forward pass on the CPU while `mx.async_eval` blocks. There, a thread also waits for
the previous tokens. On accelerators the calling thread waits for them. It first launches a part of
the pass, so that the device has work. The launch of the rest takes milliseconds. Meanwhile threads
compute the masks ::

    host     | launch a part | read | launch the rest .... | draw |
    threads                         | masks ..... |
    device   | a part of the pass ... | the rest ............... | draw |

No other thread waits there: if the environment turns CUDA graphs on, MLX captures streams in a mode
in which other threads may neither wait for an event nor allocate.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import mlx.core as mx

from kvd.worker.core.decode_step import DecodeStep, LateRow
from kvd.worker.core.request import Completion, Request
from kvd.worker.device import on_cpu
from kvd.worker.grammar.mask_memory import MaskMemory
from kvd.worker.grammar.mask_threads import HELPED_SECONDS, MaskBatch, MaskThreads, Work
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from kvd.worker.lean_imports import np
from kvd.worker.native.activation import thread_count
from kvd.worker.sampling.sampler import Sampler
from protocol.errors import KvdError

Over = tuple[Completion, KvdError | None]
"""A completion whose grammar allows no further token; with an error, if it is not complete."""

Relieve = Callable[[Sequence[Matcher | None]], None]
"""Gives up matchers if memory is too short for the masks of a step."""

FEWEST_THREADS = 2
"""Threads for masks, at least: a slow mask leaves one for others."""
MOST_THREADS = 8
HELP_SECONDS = 0.0005
"""Seconds after which more threads help with the masks that a step waits for."""
FIRST_PART = 1 / 3
"""Share of a forward pass that is launched before the previous tokens are read. The rest takes the
host of an H200 about 2 ms, and masks take 1 (`bench.grammar`)."""
SPARE_SECONDS = 0.001
"""Seconds that a step waits for masks in addition to twice the time of a recent one."""
IDLE_SECONDS = 0.001
"""Seconds that a step waits for late rows if there are no others."""
FIRST_SECONDS = 0.02
"""Time of a step before one is measured."""
_RECENT = 16
"""Steps without late rows whose times are compared: the shortest counts."""


class StepMasks:
    """The masks of one engine's decode steps.

    ``vocabulary``: tokens of the model. ``draws_late``: whether a step may draw fewer rows than it
    was launched with; otherwise it waits for all masks.
    """

    def __init__(
        self, vocabulary: int, relieve: Relieve = lambda _: None, *, draws_late: bool = True
    ) -> None:
        self._draws_late = draws_late
        self._reads_in_thread = on_cpu()
        """Whether a thread waits for the tokens of a step, instead of the calling one."""
        self.late: list[LateRow] = []
        """Rows that were launched and not drawn, the longest waiting first."""
        self._relieve = relieve
        self._filler = MaskFiller(vocabulary)
        self._memory = MaskMemory(self._filler.row_bytes)
        # Half of the processors: the others compute the forward pass.
        count = min(MOST_THREADS, max(FEWEST_THREADS, thread_count() // 2))
        self._threads = MaskThreads(count)
        self._batches: list[MaskBatch] = []
        """Batches with matchers that are lent, the oldest first."""
        self._awaited: list[MaskBatch] = []
        """Batches that began since the last step was drawn."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Seconds from `evaluate` until the masks were there, of steps without late rows."""
        self._begun = 0.0

    # Matchers advance.

    def evaluate(self, previous: DecodeStep | None, step: DecodeStep, cache: Any) -> None:
        """Evaluate a step, and start to compute its masks.

        ``previous``: the step whose tokens are its input. ``cache``: what the pass has written to.
        """
        self._begun = time.monotonic()
        reads = previous is not None and previous.has_grammars and not previous.advanced
        if reads and not self._reads_in_thread:
            mx.async_eval(cache.arrays(FIRST_PART))  # type: ignore[no-untyped-call]
        self._begin(previous, step)
        mx.async_eval(step.arrays, cache.arrays())  # type: ignore[no-untyped-call]

    def _begin(self, previous: DecodeStep | None, step: DecodeStep) -> None:
        """Read the previous tokens, and start to compute the masks that follow them."""
        if previous is not None:
            self.advance(previous)
        if step.has_grammars:
            matchers = [one.matcher for one in step.drawing if one.matcher is not None]
            missing = [one for one in matchers if one.mask is None and not one.lent]
            self._run([(one, None) for one in missing], lambda: ())

    def advance(self, step: DecodeStep) -> None:
        """Start to advance matchers by the tokens that a step has drawn, unless that was done."""
        if step.advanced or step.draw is None or not step.has_grammars:
            return
        step.advanced = True
        work = [
            (one.matcher, place)
            for place, one in enumerate(step.drawing)
            if one.matcher is not None and not (one.ended or one.dropped)
        ]
        if not work:
            return
        if step.host_tokens is None:
            known: list[int] = step.draw.tokens.tolist()
            self._run(work, lambda: known)
        else:
            host_tokens = step.host_tokens
            self._run(work, lambda: cast(list[int], host_tokens.tolist()))

    def _run(self, work: Sequence[Work], tokens: Callable[[], Sequence[int]]) -> None:
        if work:
            batch = MaskBatch(work, tokens, self._filler)
            self._batches.append(batch)
            self._awaited.append(batch)
            self._threads.run(batch, 1 + int(batch.seconds / HELPED_SECONDS))

    def take_back(self) -> None:
        """Take back the matchers that have advanced."""
        for batch in self._batches:
            batch.take_back()
        self._batches = [batch for batch in self._batches if not batch.taken_back]

    def wait(self, completions: Iterable[Completion], seconds: float = -1) -> None:
        """Wait until a matcher of these has advanced; take back all that have.

        If several are lent, waits for the first. Other completions are not waited for: they may
        have ended while their masks were computed. ``seconds``: the longest time; -1: any.
        """
        lent = (one.matcher for one in completions if one.matcher is not None and one.is_lent)
        if (matcher := next(lent, None)) is not None:
            self._wait_for(matcher, seconds)
        self.take_back()

    def _wait_for(self, matcher: Matcher, seconds: float = -1) -> None:
        batch = next(one for one in self._batches if one.lends(matcher))
        batch.wait_for(matcher, seconds)

    def discard(self, completions: Iterable[Completion]) -> None:
        """Forget late rows and the batches, after a failed step.

        Waits until the matchers of these completions have advanced. Threads may still advance the
        matchers of other completions, which have ended.
        """
        self.late = []
        for completion in completions:
            if (matcher := completion.matcher) is not None and matcher.lent:
                with suppress(Exception):  # the step's own failure is reported
                    self._wait_for(matcher)
        self._batches, self._awaited = [], []

    # Rows are drawn.

    def without_late(self, completions: list[Completion]) -> list[Completion]:
        """Return those completions whose last launched token was drawn."""
        late = {row.completion for row in self.late}
        return [one for one in completions if one not in late] if late else completions

    def forget(self, completion: Completion) -> None:
        """Drop the late row of a completion that has ended."""
        if self.late:
            self.late = [row for row in self.late if row.completion is not completion]

    def can_read_previous(self, step: DecodeStep) -> bool:
        """Return whether the previous step can be read before this one is drawn.

        It can while masks are being computed, unless the previous step may force a token: a forced
        token that replaces a token of this step must be counted after the draw of that token.
        """
        self.take_back()
        return bool(step.lent) and not any(one.stream.may_force for one in step.drawing)

    def draw(
        self, step: DecodeStep, sampler: Sampler, requests: Mapping[str, Request], *, idle: bool
    ) -> list[Over]:
        """Draw, lazily, the tokens of a step and of the late rows whose masks are ready.

        ``idle``: whether no step is in flight. Then a step without rows waits for a late row.

        Returns completions whose grammar allows no further token. What was drawn for them is
        ignored, unless the matcher is optional: then it was drawn without a mask.
        """
        self._wait(step, idle=idle)
        late = [at for at, one in enumerate(step.drawing) if one.is_lent and not one.ended]
        step.replace_late(late, self._take_ready())
        self.late += step.late
        if not step.drawing:
            return []
        matchers = [None if one.ended else one.matcher for one in step.drawing]
        self._relieve(matchers)
        masks = self._filler.fill(matchers, self._memory.take(len(matchers)))
        for completion, matcher, mask in zip(step.drawing, matchers, masks, strict=True):
            if matcher is not None:
                least = requests[completion.key[0]].submit.min_tokens
                may_end = completion.launched > least
                matcher.limit(mask, completion.stream.ends, may_end=may_end)
        over = list[Over]()
        able = masks.view(np.uint32).any(axis=1)
        for row in () if able.all() else np.flatnonzero(~able):
            matcher = matchers[row]
            assert matcher is not None
            failure = matcher.failure()
            if failure is not None and matcher.optional:
                masks[row] = 0xFF
            over.append((step.drawing[row], failure))
        step.draw_tokens(sampler, self._memory.upload(masks))
        if self._reads_in_thread and step.draw is not None:  # not shared with the calling thread
            step.host_tokens = step.draw.tokens + 0
        return over

    def _wait(self, step: DecodeStep, *, idle: bool) -> None:
        """Wait for the masks of a step, for about the time of a step at most."""
        if not (step.drawing or step.passing):
            late = [row.completion for row in self.late]
            self.wait(late, IDLE_SECONDS if idle else 0.0)
            return
        awaited, self._awaited = self._awaited, []
        usual = min(self._recent, default=FIRST_SECONDS)
        end = self._begun + 2 * usual + SPARE_SECONDS
        for batch in awaited:
            if not batch.wait(HELP_SECONDS):
                self._threads.run(batch, batch.unclaimed)
                if self._draws_late and any(map(batch.lends, step.lent)):
                    batch.wait(max(0.0, end - time.monotonic()))
        self.take_back()
        while not self._draws_late and (lent := step.lent):
            self._wait_for(lent[0])
        now = time.monotonic()
        if awaited and step.has_grammars and all(batch.taken_back for batch in awaited):
            self._recent.append(now - self._begun)

    def _take_ready(self) -> list[LateRow]:
        """Return the late rows whose masks are ready; they are late no longer."""
        late, self.late, ready = self.late, [], list[LateRow]()
        for row in late:
            completion = row.completion
            if completion.dropped:  # a forced token takes the place of the one to draw
                completion.dropped = False
            elif completion.is_lent:
                self.late.append(row)
            else:
                ready.append(row)
        return ready
