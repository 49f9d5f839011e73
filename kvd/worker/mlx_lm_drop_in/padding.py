"""Padding in a batch of unequal prompts: which of its tokens belong to which sequence.

mlx-lm announces padding before it adds the tokens (`prepare`) and ends it after them (`finalize`).
Padding is neither stored nor attended to, so it is only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A sequence's own tokens among the new tokens of a padded batch."""

    start: int
    count: int


class Padding:
    """The padding of the next tokens of each sequence."""

    def __init__(self, left: Sequence[int], lengths: Sequence[int | None]) -> None:
        self.left = list(left)
        """Padding tokens before each sequence's own tokens."""
        self.lengths = list(lengths)
        """Own tokens that each sequence still gets before padding follows; None: no padding."""

    @classmethod
    def none(cls, count: int) -> Padding:
        return cls([0] * count, [None] * count)

    def spans(self, tokens: int) -> list[Span]:
        """Return each sequence's own tokens among the next ``tokens``, and advance past them."""
        spans = []
        for index, left in enumerate(self.left):
            start = min(left, tokens)
            length = self.lengths[index]
            count = tokens - start if length is None else min(tokens - start, length)
            self.left[index] = left - start
            self.lengths[index] = None if length is None else length - count
            spans.append(Span(start, count))
        return spans

    def picked(self, indices: Sequence[int]) -> Padding:
        return Padding([self.left[i] for i in indices], [self.lengths[i] for i in indices])

    def joined(self, other: Padding) -> Padding:
        return Padding(self.left + other.left, self.lengths + other.lengths)
