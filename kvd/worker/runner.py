"""Forward passes of one model over its cache: tokens in, logits out.

Knows nothing of requests, sampling or memory budgets. Everything runs on the calling thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kvd.worker.cache.composite import ModelCache
from kvd.worker.cache.layout import Access
from kvd.worker.cache.own import OwnCache
from kvd.worker.compiled import CompiledDecode, can_compile
from kvd.worker.rounding import batch_floor

_CHECKED = (3, 200)
"""Tokens of the rows that compiled steps are checked on: one has a tail alone, one has pages."""
_CHECKED_STEPS = 2

Row = Any
"""A sequence of the runner's own cache: `SequenceRow` or `OwnRow`."""


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU here."""
    return mx.default_device().type == mx.DeviceType.cpu


class Runner:
    """A model and its cache."""

    def __init__(self, model: Any, cache: ModelCache | OwnCache) -> None:
        self.model = model
        self.cache: Any = cache
        self._compiled: CompiledDecode | None = None
        paged = isinstance(cache, ModelCache) and all(
            access is Access.PAGES for access in cache.access.values()
        )
        self._recurrent = isinstance(cache, ModelCache) and bool(cache.states.parts)
        # Rectangles change their shape with the rows that share them anyway.
        self._floor = batch_floor(model) if on_cpu() and paged and cache.batched else 1
        """Smaller batches are padded to so many rows, so that all are rounded alike."""

    @property
    def compiled(self) -> bool:
        """Whether decode steps run as compiled functions."""
        return self._compiled is not None

    def compile(self) -> bool:
        """Run decode steps as compiled functions from now on, if they do the same; return whether.

        The cache must be empty, and is again.
        """
        if not can_compile(self.cache):
            return False
        cache = self.cache
        pairs = [[self._checked_row(length) for length in _CHECKED] for _ in range(2)]
        tokens = mx.array([1] * len(_CHECKED), mx.int32)
        plain = [self.decode(pairs[0], tokens) for _ in range(_CHECKED_STEPS)]
        mx.eval(plain, cache.arrays())
        self._compiled = CompiledDecode(self.model, cache)
        try:
            fused = [self.decode(pairs[1], tokens) for _ in range(_CHECKED_STEPS)]
            mx.eval(fused, cache.arrays())
            agree = all(map(_agree, plain, fused))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            agree = False  # the model does in Python what a trace cannot follow
        if not agree:
            self._compiled = None
        for pair in pairs:
            for row in pair:
                cache.free(row)
        cache.shrink()
        return agree

    def retrace(self) -> None:
        """Forget compiled steps, where the model's code was changed in place."""
        if self._compiled is not None:
            self._compiled = CompiledDecode(self.model, self.cache)

    def _checked_row(self, length: int) -> Row:
        row = self.cache.new_row()
        self.prefill(row, [1 + position % 64 for position in range(length)])
        return row

    def prefill(self, row: Row, tokens: list[int]) -> None:
        """Run a chunk of a prompt into the row; evaluated and flushed when it returns.

        The device must be idle. Logits are neither needed nor computed.
        """
        self.cache.begin_prefill(row, len(tokens))
        self.model(mx.array([tokens]), cache=self.cache.views([row]))
        self.cache.end_pass()
        self.cache.finish_prefill()

    def score(self, row: Row, tokens: list[int]) -> mx.array:
        """Do the same, and return the chunk's logits, ``[tokens, vocab]``."""
        self.cache.begin_prefill(row, len(tokens))
        logits: mx.array = self.model(mx.array([tokens]), cache=self.cache.views([row]))[0]
        self.cache.end_pass()
        # Before the flush: what is lazy holds the pools, and a held pool is copied when written.
        mx.eval(logits)
        self.cache.finish_prefill()
        return logits

    def decode(self, rows: list[Row], tokens: mx.array) -> mx.array:
        """Run one token of each row, ``[rows]`` int32; return logits ``[rows, vocab]``, lazy.

        Flush the cache before where its `needs_flush` says so. Evaluate the result together with
        the cache's `arrays`.
        """
        passes = self._passes(rows)
        if len(passes) == 1:
            return self._decode(rows, tokens, passes[0][1])
        found, order = [], []
        for places, floor in passes:
            logits = self._decode(
                [rows[place] for place in places], tokens[mx.array(places)], floor
            )
            # In this order: what a pass takes for a moment is gone when the next one takes it.
            mx.async_eval(logits, self.cache.arrays())  # type: ignore[no-untyped-call]
            found.append(logits)
            order += places
        return mx.concatenate(found)[mx.array([order.index(place) for place in range(len(rows))])]

    def _passes(self, rows: list[Row]) -> list[tuple[list[int], int]]:
        """Return who runs together, by place, and the fewest rows that such a batch has."""
        together = [place for place, row in enumerate(rows) if self._shares(row)]
        passes = [([place], 1) for place in range(len(rows)) if place not in together]
        if together:
            groups = self.cache.passes([rows[place] for place in together])
            passes += [([together[one] for one in group], self._floor) for group in groups]
        return passes

    def _shares(self, row: Row) -> bool:
        """Return whether a row can share a pass; its recurrent state may not be whole yet."""
        return bool(self.cache.batched and (not self._recurrent or self.cache.states.complete(row)))

    def _decode(self, rows: list[Row], tokens: mx.array, floor: int) -> mx.array:
        count = len(rows)
        batch = max(count, floor)
        self.cache.begin_decode(rows, batch)
        if batch > count:
            tokens = mx.concatenate([tokens, mx.zeros((batch - count,), tokens.dtype)])
        if self._compiled is not None:
            logits = self._compiled(tokens)
        else:
            logits = self.model(tokens[:, None], cache=self.cache.views(rows))[:, -1]
        self.cache.end_pass()
        return logits[:count]


def _agree(one: mx.array, other: mx.array) -> bool:
    """Return whether logits are finite and the same but for rounding."""
    if not bool((mx.isfinite(one) & mx.isfinite(other)).all().item()):
        return False
    bound = mx.abs(one).max() * (1e-4 if one.dtype == mx.float32 else 2e-2)
    return bool((mx.abs(one - other).max() <= bound).item())
