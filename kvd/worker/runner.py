"""Forward passes of one model over its cache: tokens in, logits out.

Knows nothing of requests, sampling or memory budgets. Everything runs on the calling thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kvd.worker.cache.composite import ModelCache
from kvd.worker.cache.layout import Access
from kvd.worker.cache.own import OwnCache

CPU_BATCH = 16
"""On the CPU, batches are padded to a multiple of this.

BLAS picks another kernel, with another rounding, for products of fewer than 16 rows (measured
with OpenBLAS 0.3.21); padded, a row's logits are the same to the bit whoever shares its batch.
"""

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
        paged = isinstance(cache, ModelCache) and all(
            access is Access.PAGES for access in cache.access.values()
        )
        self._recurrent = isinstance(cache, ModelCache) and bool(cache.states.parts)
        # Rectangles change their shape with the rows that share them anyway.
        self._multiple = CPU_BATCH if on_cpu() and paged and cache.batched else 1

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
        together = [index for index, row in enumerate(rows) if self._shares(row)]
        if len(together) == len(rows):
            return self._decode(rows, tokens, self._multiple)
        alone = [index for index in range(len(rows)) if index not in together]
        found = [self._decode([rows[index]], tokens[index : index + 1], 1) for index in alone]
        if together:
            shared = [rows[index] for index in together]
            found.append(self._decode(shared, tokens[mx.array(together)], self._multiple))
        order = [*alone, *together]
        return mx.concatenate(found)[mx.array([order.index(index) for index in range(len(rows))])]

    def _shares(self, row: Row) -> bool:
        """Return whether a row can share a pass; its recurrent state may not be whole yet."""
        return bool(self.cache.batched and (not self._recurrent or self.cache.states.complete(row)))

    def _decode(self, rows: list[Row], tokens: mx.array, multiple: int) -> mx.array:
        count = len(rows)
        batch = -(-count // multiple) * multiple
        self.cache.begin_decode(rows, batch)
        if batch > count:
            tokens = mx.concatenate([tokens, mx.zeros((batch - count,), tokens.dtype)])
        logits: mx.array = self.model(tokens[:, None], cache=self.cache.views(rows))
        self.cache.end_pass()
        return logits[:count, -1]
