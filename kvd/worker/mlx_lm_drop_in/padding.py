"""Padding in a batch of unequal prompts: which of its tokens belong to which sequence.

mlx-lm announces padding before the tokens come (`prepare`) and ends it after (`finalize`). It is
neither stored nor attended to, so all that is needed is to count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Which of a padded batch's new tokens are one sequence's own: ``count`` from ``start`` on."""

    start: int
    count: int


class Padding:
    """What padding the coming tokens of each sequence have."""

    def __init__(self, left: Sequence[int], lengths: Sequence[int | None]) -> None:
        self.left = list(left)
        """Tokens in front of the sequence's own."""
        self.lengths = list(lengths)
        """Of its own that are still to come, the rest being padding; None: all that come."""

    @classmethod
    def none(cls, count: int) -> Padding:
        """No padding, for so many sequences."""
        return cls([0] * count, [None] * count)

    def spans(self, tokens: int) -> list[Span]:
        """Return whose the next ``tokens`` tokens are, and count them."""
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
        """Return the padding of these sequences."""
        return Padding([self.left[i] for i in indices], [self.lengths[i] for i in indices])

    def joined(self, other: Padding) -> Padding:
        """Return the padding of these sequences, then the other's."""
        return Padding(self.left + other.left, self.lengths + other.lengths)
