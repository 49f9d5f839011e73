"""How a model's keys and values are kept: schemes, floors, windows, and memory for copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.scheme import Scheme


def no_floors(layers: int) -> list[Scheme | None]:
    return [None] * layers


@dataclass(frozen=True)
class CacheSettings:
    """Settings of a `kvd.worker.cache.model_cache.ModelCache`."""

    schemes: tuple[Scheme, ...] = (Scheme(),)
    """One per precision level. Quantized rows start with the first."""
    mixes: tuple[tuple[Scheme, ...] | None, ...] = ()
    """Schemes by layer for each of ``schemes``; None, or no item: all layers have that scheme."""
    floors: Callable[[int], Sequence[Scheme | None]] = no_floors
    """Returns one scheme, or None, for each of a given number of layers. On no level does the layer
    get fewer bits than that."""
    quantized_start: int = 0
    """Rows shorter than this many tokens are not quantized."""
    max_size: int | None = None
    """Tokens that full attention sees: the first ``keep``, and the newest ones. None: all."""
    keep: int = 0
    scratch: int = 256 * 1024 * 1024
    """Bytes that may be in use in addition to the cache. Three quarters are for dense copies in a
    step. One quarter is for a step-down, which keeps larger pools from step to step."""

    @property
    def store_schemes(self) -> tuple[Scheme, ...]:
        """Schemes of the stores' levels: with `quantized_start`, a dense level comes first."""
        return ((Scheme(16, 16),) if self.quantized_start else ()) + self.schemes

    def layer_schemes(self, layers: int) -> list[list[Scheme]]:
        """Return the schemes of each layer by the stores' level.

        Raises ``ValueError`` if a mix is for another number of layers.
        """
        dense_levels = len(self.store_schemes) - len(self.schemes)
        mixes = chain([None] * dense_levels, self.mixes, repeat(None))
        floors = self.floors(layers)
        found: list[list[Scheme]] = [[] for _ in range(layers)]
        for scheme, mix in zip(self.store_schemes, mixes, strict=False):
            schemes = (scheme,) * layers if mix is None else mix
            for levels, own, floor in zip(found, schemes, floors, strict=True):
                levels.append(own if floor is None else own.at_least(floor))
        return found

    def only(self, level: int) -> CacheSettings:
        """Return these settings with only this precision level."""
        return replace(
            self, schemes=self.schemes[level : level + 1], mixes=self.mixes[level : level + 1]
        )

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
    held: int = 0
    """Bytes of copies that stay alive for the whole pass."""

    def hold(self, nbytes: int) -> None:
        """Count copies that stay alive until `clear`."""
        self.held += nbytes

    def add(self, nbytes: int) -> bool:
        """Count a dense copy. Returns whether the limit is reached; if so, the caller evaluates."""
        self.used += nbytes
        if self.used + self.held < self.limit:
            return False
        self.used = 0
        return True

    def reserve(self, nbytes: int) -> bool:
        """Count copies that will be made. Returns whether earlier ones must be evaluated first."""
        exceeds = self.used > 0 and self.used + nbytes > self.limit - self.held
        self.used = nbytes if exceeds else self.used + nbytes
        return exceeds

    def clear(self) -> None:
        """Forget all copies after an evaluation."""
        self.used = self.held = 0
