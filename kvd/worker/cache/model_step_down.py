"""Step-downs and pool cuts over all stores of a model, one time slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.sequence import SequenceRow
from kvd.worker.cache.step_down import StepDown


class _InSlices:
    """Several `StepDown`, one after the other."""

    def __init__(self, steps: Iterable[StepDown]) -> None:
        self.pages = 0
        self._steps = list(steps)

    @property
    def over(self) -> bool:
        return all(step.over for step in self._steps)

    def advance(self, seconds: float, clock: Callable[[], float]) -> None:
        """Work for about ``seconds`` (`StepDown.advance`). The device must be idle."""
        end = clock() + seconds
        for step in self._steps:
            if step.over:
                continue
            self.pages += step.advance(end - clock(), clock)
            if clock() >= end:
                return


class ModelStepDown(_InSlices):
    """Steps sequences down to a precision level, one attention kind after the other."""

    def __init__(self, cache: ModelCache, sequences: Iterable[SequenceRow], level: int) -> None:
        self.level = level
        stepped = list(sequences)
        dense_levels = len(cache.settings.store_schemes) - len(cache.settings.schemes)
        super().__init__(
            StepDown(
                store,
                [sequence.rows[index] for sequence in stepped],
                level + dense_levels,
                scratch=cache.settings.step_down_scratch,
            )
            for index, store in enumerate(cache.stores)
        )


class PoolTrimming(_InSlices):
    """Cuts all pools to the pages in use, level by level."""

    def __init__(self, cache: ModelCache) -> None:
        for store in cache.stores:
            store.pages.goals.clear()
        super().__init__(
            StepDown(store, [], level, scratch=cache.settings.step_down_scratch)
            for store in cache.stores
            for level in store.pages.levels
        )
