"""Logprobs of sampled tokens and of prompts, from the model's unchanged logits.

As in OpenAI's API and vLLM, bias, penalties, temperature and filters do not affect them. Only a few
values per row leave the device, never a row of the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvd.worker.sampling.largest import largest, pick
from protocol.fields import MAX_LOGPROBS, NO_LOGPROB


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and its logprob, with the most likely tokens in descending order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of several rows, lazy, on the device."""

    tokens: Any
    """``[rows]`` int32."""
    logprobs: Any
    """``[rows]`` float32."""
    top_tokens: Any
    """``[rows, MAX_LOGPROBS]`` int32; None if no row requests them."""
    top_logprobs: Any
    vocabulary: int

    def arrays(self) -> list[Any]:
        arrays = [self.tokens, self.logprobs, self.top_tokens, self.top_logprobs]
        return [array for array in arrays if array is not None]

    def read(self, tops: list[int]) -> list[Scored]:
        """Return the values of each row, with ``tops[row]`` of the most likely tokens."""
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        if self.top_tokens is None:
            return [Scored(*pair) for pair in zip(tokens, map(_finite, logprobs), strict=True)]
        ids, values = self.top_tokens.tolist(), self.top_logprobs.tolist()
        return [
            Scored(tokens[row], _finite(logprobs[row]), self._top(ids[row], values[row], top))
            for row, top in enumerate(tops)
        ]

    def _top(self, ids: list[int], values: list[float], top: int) -> tuple[tuple[int, float], ...]:
        pairs = zip(ids[:top], values[:top], strict=True)
        # With fewer possible tokens than requested, indices may lie beyond the vocabulary.
        return tuple((token, _finite(value)) for token, value in pairs if token < self.vocabulary)


def score(logits: Any, tokens: Any, *, top: bool) -> Scores:
    """Return the logprobs of ``tokens`` ``[rows]`` in ``logits`` ``[rows, vocabulary]``, lazily.

    With ``top``, also return those of the `MAX_LOGPROBS` most likely tokens. The number is fixed,
    so that a row's values do not depend on other rows.
    """
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = (pick(logits, tokens[:, None]) - norm)[:, 0]
    if not top:
        return Scores(tokens, logprobs, None, None, logits.shape[-1])
    values, indices = largest(logits, MAX_LOGPROBS)
    return Scores(tokens, logprobs, indices, values - norm, logits.shape[-1])


def _finite(logprob: float) -> float:
    return max(logprob, NO_LOGPROB)
