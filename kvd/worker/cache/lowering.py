"""Stepping sequences of a model down the ladder, in all its stores, a time slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.worker.cache.composite import ModelCache, SequenceRow
from kvd.worker.cache.requantize import StepDown


class Lowering:
    """Brings sequences to a lower level of the ladder (0 is its top), kind after kind."""

    def __init__(self, cache: ModelCache, sequences: Iterable[SequenceRow], level: int) -> None:
        self.level = level
        self.pages = 0
        """Converted so far."""
        found = list(sequences)
        # Above the ladder there may be a level for rows that are not quantized yet.
        lift = len(cache.settings.schemes) - len(cache.settings.ladder)
        self._steps = [
            StepDown(
                store,
                [one.rows[index] for one in found],
                level + lift,
                scratch=cache.settings.lowering_scratch,
            )
            for index, store in enumerate(cache.stores)
        ]

    @property
    def over(self) -> bool:
        """Whether nothing is left to do; pages that still await a flush count as left."""
        return all(step.over for step in self._steps)

    def advance(self, seconds: float, clock: Callable[[], float]) -> None:
        """Work for about ``seconds``; the device must be idle (`StepDown.advance`)."""
        end = clock() + seconds
        for step in self._steps:
            if step.over:
                continue
            self.pages += step.advance(end - clock(), clock)
            if clock() >= end:
                return
