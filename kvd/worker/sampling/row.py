"""One row of the sampler: its settings and its progress."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from protocol.types import Sampling
from protocol.worker import Submit


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How one row is sampled, and which logprobs it returns."""

    sampling: Sampling
    """Settings of the request, with a seed unless greedy."""
    choice: int = 0
    ends: tuple[int, ...] = ()
    """Tokens that end the completion; excluded until ``min_tokens``."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of most likely tokens to return with the sampled one. None: no logprobs."""

    @staticmethod
    def of(request: Submit, ends: Collection[int], choice: int = 0) -> RowSettings:
        return RowSettings(
            request.sampling, choice, tuple(sorted(ends)), request.min_tokens, request.logprobs
        )


@dataclass(slots=True)
class SamplerRow:
    """A row that was added to the sampler."""

    settings: RowSettings
    drawn: int
    """Tokens so far, including those in flight."""

    @property
    def penalized(self) -> bool:
        """Whether the row needs token counts."""
        sampling = self.settings.sampling
        subtracted = sampling.presence_penalty or sampling.frequency_penalty
        return bool(subtracted) or sampling.repetition_penalty != 1.0

    @property
    def excludes_ends(self) -> bool:
        """Whether the next token must not end the completion."""
        return bool(self.settings.ends) and self.drawn < self.settings.min_tokens
