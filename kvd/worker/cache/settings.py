"""How a model's keys and values are kept: schemes, floors, windows, and memory for copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.scheme import Scheme


def no_floors(layers: int) -> list[Scheme | None]:
    return [None] * layers


@dataclass(frozen=True)
class CacheSettings:
    """Settings of a `kvd.worker.cache.model_cache.ModelCache`."""

    schemes: tuple[Scheme, ...] = (Scheme(),)
    """One per precision level. Rows start with the first."""
    floors: Callable[[int], Sequence[Scheme | None]] = no_floors
    """Returns, for a number of layers, the scheme of each layer below which it does not go."""
    quantized_start: int = 0
    """Rows shorter than this many tokens are not quantized."""
    max_size: int | None = None
    """Full attention sees only the newest ``max_size`` tokens, including the first ``keep``."""
    keep: int = 0
    scratch: int = 256 * 1024 * 1024
    """Bytes that a step may hold in addition to the cache. Three quarters are for dense copies. One
    quarter is for stepping down, whose pools may exceed their size while prompts are prefilled."""

    @property
    def store_schemes(self) -> tuple[Scheme, ...]:
        """Schemes of the stores' levels: with `quantized_start`, one more level comes first."""
        return ((Scheme(16, 16),) if self.quantized_start else ()) + self.schemes

    @property
    def prefill_scratch(self) -> int:
        return self.scratch - self.step_down_scratch

    @property
    def step_down_scratch(self) -> int:
        return self.scratch // 4

    def kind(self, kind: Kind) -> Kind:
        return Kind(self.max_size, self.keep) if kind == FULL and self.max_size else kind

    def store_level(self, level: int) -> int:
        """Return the stores' level for a precision level; for 0, the level where rows start."""
        return level + len(self.store_schemes) - len(self.schemes) if level else 0


@dataclass
class Scratch:
    """Counts dense copies of pages that are alive, or will be once lazy steps are evaluated."""

    limit: int = 256 * 1024 * 1024
    """Bytes that dense copies may take at once."""
    used: int = 0

    def add(self, nbytes: int) -> bool:
        """Count a dense copy. Returns whether the limit is reached: the caller evaluates then."""
        self.used += nbytes
        if self.used < self.limit:
            return False
        self.used = 0
        return True

    def reserve(self, nbytes: int) -> bool:
        """Count copies to come. Returns whether the readers of earlier ones must end first."""
        exceeds = self.used > 0 and self.used + nbytes > self.limit
        self.used = nbytes if exceeds else self.used + nbytes
        return exceeds

    def clear(self) -> None:
        """Forget all copies after an evaluation."""
        self.used = 0
