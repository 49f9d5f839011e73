"""The masks of decode steps: which tokens the grammars of their rows allow next.

A mask depends on the previous token. MLX evaluates a forward pass on the CPU while `mx.async_eval`
blocks without Python's lock. There, a thread therefore computes the masks during the call. On
accelerators the call returns early, and the calling thread computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from kvd.worker.core.decode_step import DecodeStep
from kvd.worker.core.forced import restart_sampling
from kvd.worker.core.request import Completion, Request
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from kvd.worker.native.activation import thread_count
from kvd.worker.sampling.sampler import Sampler
from kvd.worker.serving.runner import on_cpu
from protocol.errors import KvdError

Relieve = Callable[[Sequence[Matcher | None]], None]
"""Gives up matchers if memory is too short for the masks of a step."""


class StepMasks:
    """The masks of one engine's decode steps. ``vocabulary``: tokens of the model."""

    def __init__(self, vocabulary: int, relieve: Relieve = lambda _: None) -> None:
        self._relieve = relieve
        # Half of the processors: the others compute the forward pass.
        self._filler = MaskFiller(vocabulary, thread_count() // 2)
        self._thread = ThreadPoolExecutor(1, "masks") if on_cpu() else None
        self._ahead: Future[None] | None = None

    def begin(self, previous: DecodeStep | None, step: DecodeStep) -> None:
        """Start to compute masks of ``step`` from the tokens of the previous one, in the thread.

        Call it just before the forward pass of ``step`` is evaluated, and `wait` after it. Waits
        for the tokens.
        """
        if self._thread is None or not step.has_grammars:
            return
        if previous is None or previous.draw is None:
            return
        tokens: list[int] = previous.draw.tokens.tolist()
        drawn = [
            (one.matcher, token)
            for one, token in zip(previous.drawing, tokens, strict=True)
            if one.matcher is not None and not (one.ended or one.dropped) and step.draws(one)
        ]
        if drawn:
            self._ahead = self._thread.submit(self._fill_ahead, drawn)

    def _fill_ahead(self, drawn: list[tuple[Matcher, int]]) -> None:
        for matcher, token in drawn:
            matcher.push_ahead(token)
        self._filler.fill_ahead([matcher for matcher, _ in drawn])

    def wait(self) -> None:
        """Wait for the thread: until then, only the thread may use the matchers."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.result()

    def draw(
        self, step: DecodeStep, sampler: Sampler, requests: Mapping[str, Request]
    ) -> list[tuple[Completion, KvdError | None]]:
        """Draw the tokens of a step, whose previous tokens were read, lazily.

        Return the completions without a further token, whose draw is ignored: their grammar is
        complete, or the error.
        """
        matchers = [None if one.ended or one.dropped else one.matcher for one in step.drawing]
        self._relieve(matchers)
        masks = self._filler.fill(matchers)
        for completion, matcher, mask in zip(step.drawing, matchers, masks, strict=True):
            if matcher is not None:
                least = requests[completion.key[0]].submit.min_tokens
                may_end = len(completion.tokens) >= least
                matcher.limit(mask, completion.stream.ends, may_end=may_end)
        over: list[tuple[Completion, KvdError | None]] = []
        for row in np.flatnonzero(~np.any(masks, axis=1)):
            matcher = matchers[row]
            assert matcher is not None
            completion, failure = step.drawing[row], matcher.failure()
            if failure is not None and matcher.optional:
                completion.drop_grammar(f"calls are no longer kept valid: {failure.message}")
                masks[row] = 0xFF
            else:
                over.append((completion, failure))
        step.draw_tokens(sampler, mx.array(masks))
        for completion in step.drawing:
            if completion.dropped:
                restart_sampling(sampler, requests[completion.key[0]], completion)
        return over
