"""Stepping sequences of a model down the ladder, in all its stores, a time slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.worker.cache.model_cache import ModelCache, SequenceRow
from kvd.worker.cache.step_down import StepDown


class _Sliced:
    """Step-downs of several pools, one after the other."""

    def __init__(self, steps: Iterable[StepDown]) -> None:
        self.pages = 0
        """Converted so far."""
        self._steps = list(steps)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
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


class ModelStepDown(_Sliced):
    """Brings sequences to a lower level of the ladder (0 is its top), kind after kind."""

    def __init__(self, cache: ModelCache, sequences: Iterable[SequenceRow], level: int) -> None:
        self.level = level
        found = list(sequences)
        lift = len(cache.settings.store_schemes) - len(cache.settings.schemes)
        super().__init__(
            StepDown(
                store,
                [one.rows[index] for one in found],
                level + lift,
                scratch=cache.settings.lowering_scratch,
            )
            for index, store in enumerate(cache.stores)
        )


class PoolTrimming(_Sliced):
    """Cuts all pools to what is used, level after level."""

    def __init__(self, cache: ModelCache) -> None:
        for store in cache.stores:
            store.goals.clear()  # what they were growing to
        super().__init__(
            StepDown(store, [], level, scratch=cache.settings.lowering_scratch)
            for store in cache.stores
            for level in store.levels
        )
