"""Compiles the kernels of a model's decode steps before the first of them runs, all at once.

Which kernels a step launches follows from its graph. So the graphs of all kinds of steps are built,
with rows of empty pages, and dropped. A kind that is missing here compiles its kernels when it
first occurs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving.runner import Runner

TAIL = 70
ROWS = (9, 17, 25)
"""Numbers of rows with which products use other kernels than with up to 8 rows."""
DONE = 0.8
"""Fraction of the load before this."""

_log = logging.getLogger("kvd.worker")

Levels = tuple[int, ...]
"""Levels of the pages of a row."""


def compile_ahead(
    make_runner: Callable[[CacheSettings], Runner],
    product: Callable[..., mx.array],
    kernels: FusedBackend,
    settings: Sequence[CacheSettings],
) -> None:
    """Compile the kernels of decode steps with each of these settings, if modules are kept."""
    if modules.current() is None:
        return
    try:
        with modules.ahead(DONE):
            for limits in dict.fromkeys(settings):
                for levels, rows, decoded in _kinds(make_runner(limits).cache):
                    runner = make_runner(limits)
                    runner.cache.use(product, kernels)
                    _build(runner, levels, rows, decoded)
    except Exception as error:  # noqa: BLE001 - models raise any type; the checks will find out
        _log.info("not all kernels were compiled ahead: %s", error)


def _kinds(cache: Any) -> Iterator[tuple[Levels, int, int]]:
    """Yield levels of pages, rows in the cache, and rows that are decoded."""
    count = min((len(store.schemes) for store in cache.stores), default=0)
    yield (), 2, 2
    for first in range(count):
        for end in range(first + 1, count + 1):  # a row's pages are on neighboring levels
            yield tuple(range(first, end)), 2, 2
    yield (0,)[:count], 2, 1  # the rows are not exactly the tails
    for rows in ROWS:
        yield (0,)[:count], rows, rows


def _build(runner: Runner, levels: Levels, rows: int, decoded: int) -> None:
    """Build the graph of a step over rows that have a page on each of the levels."""
    cache = runner.cache
    sequences = [cache.new_row() for _ in range(rows)]
    for sequence in sequences:
        for store, row in zip(cache.stores, sequence.rows, strict=True):
            row.pages = [page for level in levels for page in store.pages.take(level, 1)]
            row.length = PAGE_TOKENS * len(levels) + TAIL
        sequence.length = PAGE_TOKENS * len(levels) + TAIL
    runner.decode(sequences[-decoded:], mx.zeros((decoded,), mx.int32))
