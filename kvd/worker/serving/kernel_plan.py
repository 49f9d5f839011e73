"""Compiles the kernels of a model's steps before the first of them runs, all at once.

Which kernels a decode step or a prefill pass launches follows from its graph. So the graphs of all
kinds of them are built, with rows of empty pages, and dropped. A kind that is missing here compiles
its kernels when it first occurs.
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
CHUNKS = ((TAIL,), (3 * PAGE_TOKENS, TAIL))
"""Chunks of one row in a pass. The last one of two reads pages that the first one fills."""
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
    """Compile the kernels with each of these settings, if modules are kept."""
    if modules.current() is None:
        return

    def make(limits: CacheSettings) -> Runner:
        runner = make_runner(limits)
        runner.cache.use(product, kernels)
        return runner

    try:
        with modules.ahead(DONE):
            for limits in dict.fromkeys(settings):
                for levels, rows, decoded in _kinds(make_runner(limits).cache):
                    _build(make(limits), levels, rows, decoded)
                for chunks in _passes(make_runner(limits).cache):
                    _build_pass(make(limits), chunks)
    except Exception as error:  # noqa: BLE001 - models raise any type; the checks will find out
        _log.info("not all kernels were compiled ahead: %s", error)


def _kinds(cache: Any) -> Iterator[tuple[Levels, int, int]]:
    """Yield levels of pages, rows in the cache, and rows that are decoded."""
    yield (), 2, 2
    for levels in _neighbors(cache):
        yield levels, 2, 2
    lowest = next(_neighbors(cache), ())[:1]
    yield lowest, 2, 1  # the rows are not exactly the tails
    for rows in ROWS:
        yield lowest, rows, rows


def _neighbors(cache: Any) -> Iterator[Levels]:
    """Yield the levels that a row's pages can be on: neighboring ones."""
    count = min((len(store.schemes) for store in cache.stores), default=0)
    for first in range(count):
        for end in range(first + 1, count + 1):
            yield tuple(range(first, end))


def _passes(cache: Any) -> Iterator[list[tuple[Levels, Sequence[int]]]]:
    """Yield the rows of prefill passes: levels of their pages, and their chunks' tokens."""
    if not cache.can_pack:
        return
    for levels in ((), *_neighbors(cache)):
        for counts in CHUNKS:
            yield [(levels, counts)]


def _build(runner: Runner, levels: Levels, rows: int, decoded: int) -> None:
    """Build the graphs of a step, over rows with a page on each of the levels, and of a flush."""
    sequences = [_row(runner.cache, levels) for _ in range(rows)]
    for store in runner.cache.stores:
        for layer in store.layers:
            for level in levels:
                store.backend.pack_tails(layer, level, [0])
    runner.decode(sequences[-decoded:], mx.zeros((decoded,), mx.int32))


def _build_pass(runner: Runner, rows: Sequence[tuple[Levels, Sequence[int]]]) -> None:
    """Build the graph of a prefill pass, and of the flush after it."""
    cache, sequences, chunks = runner.cache, list[Any](), list[int]()
    for levels, counts in rows:
        sequences += [_row(cache, levels) if levels else cache.new_row()] * len(counts)
        chunks += counts
    cache.begin_packed(sequences, chunks, sum(chunks))
    runner.model(mx.zeros((sum(chunks), 1), mx.int32), cache=cache.views(sequences))
    for store in cache.stores:
        for layer in store.layers:
            layer.put(layer.gather_tails())


def _row(cache: Any, levels: Levels) -> Any:
    """Return a row that has a page on each of the levels."""
    sequence = cache.new_row()
    for store, row in zip(cache.stores, sequence.rows, strict=True):
        row.pages = [page for level in levels for page in store.pages.take(level, 1)]
        row.length = PAGE_TOKENS * len(levels) + TAIL
        row.level = max(levels, default=row.level)
    sequence.length = PAGE_TOKENS * len(levels) + TAIL
    return sequence
