"""The expected content of drop-in caches: dense rows whose pages were quantized and dequantized.

Covers one cache. `test_state_machine` covers the rows and pages that caches share.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme, full_pages
from kvd.worker.mlx_lm_drop_in.caches import DropInKVCache
from kvd.worker.mlx_lm_drop_in.shared_store import SharedRow, SharedStore
from kvd.worker.serving.seam import scaled_dot_product_attention
from tests.worker.attention.dense import dense_attention
from tests.worker.cache.invariants import check_store

HEADS, QUERY_HEADS, K_DIM, V_DIM = 1, 2, 8, 12
GEOMETRY = LayerGeometry(HEADS, K_DIM, V_DIM)
TAIL_BYTES = 2 * PAGE_TOKENS * HEADS * (K_DIM + V_DIM) * 4
SCALE = 0.3
Sides = tuple[np.ndarray, np.ndarray]
"""Keys and values, ``[heads, tokens, dim]``."""


def page_bytes(scheme: Scheme) -> int:
    """Return the bytes of a page: words, and for each group a scale and a bias."""
    found = 0
    for dim, bits, group in (
        (K_DIM, scheme.k_bits, scheme.k_group),
        (V_DIM, scheme.v_bits, scheme.v_group),
    ):
        elements = HEADS * dim * PAGE_TOKENS
        found += 4 * elements if bits == 16 else elements * bits // 8 + elements // group * 8
    return found


def through(scheme: Scheme, sides: Sides) -> Sides:
    """Quantize and dequantize one page's keys and values."""
    pool = PagePool(GEOMETRY, scheme, mx.float32)
    keys, values = pool.unpack(*pool.pack(*(mx.array(side)[None] for side in sides)))
    return np.array(keys[0]), np.array(values[0])


class Tag:
    """Identifies one page's storage in all rows that share it."""


@dataclass
class DenseSequence:
    """One sequence: each token as attention sees it, and each page that was ever committed."""

    schemes: tuple[Scheme, ...]
    start: int = 0
    """Length at which the sequence leaves the dense start; 0 without a dense start."""
    keys: np.ndarray = field(default_factory=lambda: np.zeros((HEADS, 0, K_DIM), np.float32))
    values: np.ndarray = field(default_factory=lambda: np.zeros((HEADS, 0, V_DIM), np.float32))
    level: int = 0
    levels: list[int] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    was: int = 0
    """Length at the last comparison; tokens may have been removed since then."""

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def copy(self) -> DenseSequence:
        made = copy.copy(self)
        made.levels, made.tags = list(self.levels), list(self.tags)
        return made

    def retagged(self, new: dict[Tag, Tag]) -> DenseSequence:
        """Return the sequence as copied to another store, where each copied page gets a new tag.

        ``new`` maps old tags to new ones. Sequences with the same map still share their pages.
        """
        made = self.copy()
        made.tags = [new.setdefault(tag, Tag()) for tag in self.tags]
        return made

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys = np.concatenate([self.keys, keys], axis=1)
        self.values = np.concatenate([self.values, values], axis=1)
        while len(self.levels) < full_pages(self.length):
            self.levels.append(-1)
            self.tags.append(Tag())
            self.lower(len(self.levels) - 1, self.level)

    def lower(self, index: int, level: int) -> None:
        """Quantize a page. A side with equal bits at the old and the new level does not change."""
        here = slice(PAGE_TOKENS * index, PAGE_TOKENS * (index + 1))
        before, scheme = self.levels[index], self.schemes[level]
        keys, values = through(scheme, (self.keys[:, here], self.values[:, here]))
        if before < 0 or self.schemes[before].k_bits != scheme.k_bits:
            self.keys = self.keys.copy()
            self.keys[:, here] = keys
        if before < 0 or self.schemes[before].v_bits != scheme.v_bits:
            self.values = self.values.copy()
            self.values[:, here] = values
        self.levels[index] = level

    def due(self) -> bool:
        """Return whether the sequence is long enough to be quantized, and is not."""
        return 0 < self.start <= max(self.length, self.was) and self.level == 0

    def leave_top(self) -> None:
        self.level = 1
        for index, level in enumerate(self.levels):
            if level == 0:
                self.lower(index, 1)

    def agrees(self, first: int, sides: Iterable[np.ndarray]) -> None:
        """Assert that these are the keys and values from token ``first`` on."""
        for got, true in zip(sides, (self.keys, self.values), strict=True):
            assert np.array_equal(got, true[:, first : first + got.shape[1]])

    def trim(self, count: int) -> None:
        left = max(0, self.length - count)
        self.keys, self.values = self.keys[:, :left], self.values[:, :left]
        del self.levels[left // PAGE_TOKENS :], self.tags[left // PAGE_TOKENS :]


@dataclass(eq=False)
class Twin:
    """A cache and its expected content."""

    cache: DropInKVCache
    rows: list[DenseSequence]

    def update(
        self,
        counts: list[int],
        rng: np.random.Generator,
        *,
        left: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Append ``counts`` tokens to the rows, padded to a rectangle, and attend.

        ``meanwhile`` runs within the pass, before a layer that shares the keys attends.
        """
        tokens = max(counts)
        padding = [tokens - count for count in counts]
        if left:
            self.cache.prepare(left_padding=padding)
        elif any(padding):
            self.cache.prepare(lengths=counts, right_padding=padding)
        offsets = np.array(self.cache.offset).reshape(-1)
        starts = padding if left else [0] * len(counts)
        wanted = [row.length - start for row, start in zip(self.rows, starts, strict=True)]
        assert offsets.tolist() == wanted[: len(offsets)]
        # Padding is NaN, because it must never be read.
        keys, values = (
            np.full((len(counts), HEADS, tokens, dim), np.nan, np.float32) for dim in (K_DIM, V_DIM)
        )
        spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        truths = []
        for index, (row, span, count) in enumerate(zip(self.rows, spans, counts, strict=True)):
            keys[index, :, span] = rng.normal(size=(HEADS, count, K_DIM))
            values[index, :, span] = rng.normal(size=(HEADS, count, V_DIM))
            if row.due():
                row.leave_top()
            before = row.keys, row.values
            new = keys[index, :, span], values[index, :, span]
            row.append(*new)
            # A chunk attends to its own tokens before they are quantized in pages. A decode step
            # attends to the page that it commits.
            chunk = [np.concatenate(sides, axis=1) for sides in zip(before, new, strict=True)]
            truths.append((row.keys, row.values) if tokens == 1 and all(counts) else tuple(chunk))
        reading = self.cache.update_and_fetch(mx.array(keys), mx.array(values))
        if meanwhile is not None:
            meanwhile()
        self._attend(reading, truths, spans, tokens, rng)
        if meanwhile is not None:
            self._attend(self.cache.keys_and_values(), truths, spans, tokens, rng)
        if left or any(padding):
            self.cache.finalize()

    def _attend(
        self,
        reading: tuple[Any, Any],
        truths: Sequence[Sides],
        spans: list[slice],
        tokens: int,
        rng: np.random.Generator,
    ) -> None:
        queries = np.full((len(spans), QUERY_HEADS, tokens, K_DIM), np.nan, np.float32)
        for index, span in enumerate(spans):
            count = span.stop - span.start
            queries[index, :, span] = rng.normal(size=(QUERY_HEADS, count, K_DIM))
        given = mx.array(queries)
        output = np.array(
            scaled_dot_product_attention(given, *reading, cache=self.cache, scale=SCALE, mask=None)
        )
        assert np.isfinite(output).all()
        for index, (truth, span) in enumerate(zip(truths, spans, strict=True)):
            if span.start == span.stop:
                assert not output[index].any()
                continue
            sides = (mx.array(side) for side in truth)
            wanted = dense_attention(given[index, :, span], *sides, SCALE, kind=self.cache.kind)
            np.testing.assert_allclose(output[index, :, span], np.array(wanted), atol=1e-4)

    def trim(self, count: int) -> None:
        for row in self.rows:
            row.trim(count)

    def paired(self) -> list[tuple[Row, DenseSequence, dict[int, PageId]]]:
        """Return the non-empty rows, their expected content, and their pages by number."""
        return [
            (one.row, row, numbered(one.row))
            for one, row in zip(self.cache.rows, self.rows, strict=True)
            if one.row is not None
        ]

    def adopt(self) -> None:
        """Quantize the expected rows where a flush did, and assert that they are long enough."""
        for one, row, _ in self.paired():
            if one.level != row.level:
                assert one.level == 1
                assert row.due(), "quantized before its length"
                row.leave_top()

    def check_lengths(self) -> None:
        """Compare lengths and levels, and assert that no page is missing."""
        lengths = [row.length for row in self.rows]
        assert self.cache.lengths == lengths
        assert self.cache.empty() == (not any(lengths))
        window = self.cache.kind.window or max(lengths)
        assert self.cache.size() == min(window, max(lengths))
        self.adopt()
        for row in self.rows:
            row.was = row.length
        for one, row, pages in self.paired():
            assert [row.levels[index] for index in pages] == [page.level for page in pages.values()]
            assert len(row.levels) == one.paged
            seen = pages_seen(self.cache.kind, row.length, one.tail_start)
            assert seen <= pages.keys(), "a visible page is missing"

    def wanted_bytes(self) -> int:
        """Return the bytes of distinct pages and of the tails of distinct rows."""
        pages: dict[Tag | PageId, int] = {}
        tails = set()
        for one, row, held in self.paired():
            tails.add(one)
            for index in held:
                # Rows that left the dense start at different times have different pages.
                name = held[index] if row.start else row.tags[index]
                pages[name] = page_bytes(row.schemes[row.levels[index]])
            for page in one.written_ahead:
                pages[page] = page_bytes(row.schemes[page.level])
        return sum(pages.values()) + len(tails) * TAIL_BYTES

    def like(self, cache: DropInKVCache, rows: list[DenseSequence] | None = None) -> Twin:
        """Return the twin of a cache that was made from this one, in the same store."""
        return Twin(cache, [row.copy() for row in (self.rows if rows is None else rows)])


@cache
def pages_seen(kind: Kind, length: int, tail_start: int) -> frozenset[int]:
    """Return the numbers of the pages before the tail that the next query sees in part."""
    seen = np.array(kind.visible(mx.array([length]), mx.arange(length)))[:tail_start]
    return frozenset((np.flatnonzero(seen) // PAGE_TOKENS).tolist())


def numbered(row: Row) -> dict[int, PageId]:
    """Return a row's pages by number: page 3 has the tokens from 192 on."""
    return {row.start(index) // PAGE_TOKENS: page for index, page in enumerate(row.pages)}


def check_shared(shared: SharedStore, holders: Sequence[Sequence[SharedRow]]) -> None:
    """Assert the invariants of a shared store, given the rows of all caches that are alive."""
    with shared.at_work():
        counts = Counter(row for rows in holders for row in rows)
        assert all(row.holders == count for row, count in counts.items()), "a reference is lost"
        held = {row.row for row in counts if row.row is not None}
        assert held == set(() if shared._rows is None else shared._rows.rows), "a row is lost"
        if shared._rows is not None:
            check_store(shared._rows)
