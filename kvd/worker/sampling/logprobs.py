"""Logprobs of drawn tokens and of prompts, from the logits as the model gave them.

Before bias, penalties, temperature and filters, as OpenAI and vLLM tell them. Only the wanted
rows' few values leave the device, never a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvd.worker.sampling.largest import largest
from protocol.types import MAX_LOGPROBS, NO_LOGPROB


@dataclass(frozen=True, slots=True)
class Scored:
    """A token, its logprob, and the most likely tokens with theirs, falling."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """The same of several rows, lazy on the device."""

    tokens: Any
    """``[rows]`` int32."""
    logprobs: Any
    """``[rows]`` float32."""
    top_tokens: Any
    """``[rows, MAX_LOGPROBS]`` int32, or None if no row wants them."""
    top_logprobs: Any
    vocabulary: int

    def arrays(self) -> list[Any]:
        """Return what is to be evaluated."""
        found = [self.tokens, self.logprobs, self.top_tokens, self.top_logprobs]
        return [one for one in found if one is not None]

    def read(self, tops: list[int]) -> list[Scored]:
        """Return the rows' values, each with so many of the most likely tokens."""
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        if self.top_tokens is None:
            return [Scored(*one) for one in zip(tokens, map(_told, logprobs), strict=True)]
        ids, values = self.top_tokens.tolist(), self.top_logprobs.tolist()
        return [
            Scored(tokens[row], _told(logprobs[row]), self._top(ids[row], values[row], top))
            for row, top in enumerate(tops)
        ]

    def _top(self, ids: list[int], values: list[float], top: int) -> tuple[tuple[int, float], ...]:
        pairs = zip(ids[:top], values[:top], strict=True)
        # Places beyond the vocabulary come where fewer tokens are possible than were wanted.
        return tuple((token, _told(value)) for token, value in pairs if token < self.vocabulary)


def score(logits: Any, tokens: Any, *, top: bool) -> Scores:
    """Return the logprobs of ``tokens`` ``[rows]`` in ``logits`` ``[rows, vocabulary]``, lazily.

    With ``top``, also those of the `MAX_LOGPROBS` most likely tokens: always so many, so that a
    row's do not depend on what others want.
    """
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    mine = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - norm)[:, 0]
    if not top:
        return Scores(tokens, mine, None, None, logits.shape[-1])
    values, places = largest(logits, MAX_LOGPROBS)
    return Scores(tokens, mine, places, values - norm, logits.shape[-1])


def _told(logprob: float) -> float:
    return max(logprob, NO_LOGPROB)
