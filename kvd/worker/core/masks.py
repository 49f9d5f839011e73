"""The masks of a decode step: which tokens the grammars of its rows allow next."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from kvd.worker.core.decode_step import DecodeStep
from kvd.worker.core.forced import restart_sampling
from kvd.worker.core.request import Completion, Request
from kvd.worker.grammar.matcher import MaskFiller
from kvd.worker.sampling.sampler import Sampler
from protocol.errors import KvdError


def draw_masked(
    step: DecodeStep,
    sampler: Sampler,
    filler: MaskFiller,
    requests: Mapping[str, Request],
    vocabulary: int,
) -> list[tuple[Completion, KvdError | None]]:
    """Draw the tokens of a step, whose previous tokens were read, lazily.

    Return the completions without a further token, whose draw is ignored: their grammar is
    complete, or the error. ``vocabulary``: tokens of the model.
    """
    matchers = [None if one.ended or one.dropped else one.matcher for one in step.drawing]
    masks = filler.fill(matchers, vocabulary)
    over: list[tuple[Completion, KvdError | None]] = []
    for completion, matcher, mask in zip(step.drawing, matchers, masks, strict=True):
        if matcher is None:
            continue
        least = requests[completion.key[0]].submit.min_tokens
        may_end = len(completion.tokens) >= least
        if not matcher.limit(mask, completion.stream.ends, may_end=may_end):
            over.append((completion, matcher.failure()))
    step.draw_tokens(sampler, mx.array(masks))
    for completion in step.drawing:
        if completion.dropped:
            restart_sampling(sampler, requests[completion.key[0]], completion)
    return over
