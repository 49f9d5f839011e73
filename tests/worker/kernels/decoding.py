"""A decode step over random pages for the kernels, and its result by dense attention.

Pages are in random slots of their pools, and tails in random tail slots. Unused slots and tokens
hold NaN. The expected result is computed in float64, over pages that MLX dequantizes in float32.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.worker.attention.kernels import launch as launches
from kvd.worker.attention.kernels.arguments import Attention
from kvd.worker.attention.kernels.language import CUDA, METAL
from kvd.worker.attention.kernels.launch import Launch
from kvd.worker.attention.kernels.shape import Shape, Side
from kvd.worker.cache import packed as pk
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.splits import PADDING, Splits
from protocol.pages import TAIL_TOKENS
from tests.worker.kernels.wrap import Language

LANGUAGES = {"metal": METAL, "cuda": CUDA}


@dataclass(frozen=True)
class Case:
    """One decode step's shape."""

    dtype: mx.Dtype = mx.float32
    k_dim: int = 64
    v_dim: int = 64
    kv_heads: int = 2
    repeats: int = 1
    queries: int = 1
    schemes: tuple[str, ...] = ("K4V4",)
    """KV schemes by level. A row's pages are on the levels in turn."""
    rows: tuple[tuple[int, int], ...] = ((2, 70), (0, 8), (5, 127))
    """For each row, the pages before the tail and the tokens in the tail."""
    window: int | None = None
    """Size of the sliding window in tokens. Every second page that it hides is dropped already."""
    keep: int = 0
    sinks: bool = False
    padding: int = 0
    """Padding added to each of the batch, the splits and the list of pages."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The case's name in pytest."""
        parts = [str(self.dtype).rpartition(".")[2], f"{self.k_dim}x{self.v_dim}"]
        parts += [f"{self.kv_heads}x{self.repeats}x{self.queries}", "+".join(self.schemes)]
        parts += [f"{pages}p{tail}" for pages, tail in self.rows]
        parts += [f"window{self.window}"] if self.window else []
        parts += [f"keep{self.keep}"] if self.keep else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"padding{self.padding}"] if self.padding else []
        return "-".join(parts)


class Step:
    """A case's arrays."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._random = random.Random(case.seed)
        self._numpy = np.random.default_rng(case.seed)
        geometry = LayerGeometry(case.kv_heads, case.k_dim, case.v_dim, case.dtype.size)
        self.pools = [PagePool(geometry, Scheme.parse(s), case.dtype) for s in case.schemes]
        self.scale = case.k_dim**-0.5
        batch = len(case.rows) + case.padding
        q_heads = case.kv_heads * case.repeats
        self.queries = self._noise(batch, q_heads, case.queries, case.k_dim)
        self.sinks = self._noise(q_heads) if case.sinks else None
        self._pages = self._list_pages()
        self._make_pools()
        self._make_rows()

    def _noise(self, *shape: int) -> mx.array:
        return mx.array(self._numpy.normal(size=shape).astype(np.float32)).astype(self.case.dtype)

    def _low(self, row: int) -> int:
        """Return the first position that a row's newest token sees after the kept ones."""
        pages, tail = self.case.rows[row]
        newest = pages * PAGE_TOKENS + tail - 1
        window = self.case.window
        return 0 if window is None else newest - (window - self.case.keep - 1)

    def _is_gone(self, row: int, index: int) -> bool:
        start = index * PAGE_TOKENS
        hidden = start >= self.case.keep and start + PAGE_TOKENS <= self._low(row) - 7
        return hidden and index % 2 == 0

    def _list_pages(self) -> list[list[tuple[int, int, int]]]:
        """Return level, slot and position of each row's pages."""
        counts = [0] * len(self.pools)
        rows = []
        for row, (count, _) in enumerate(self.case.rows):
            rows.append([])
            for index in range(count):
                if self._is_gone(row, index):
                    continue
                level = (row + index) % len(self.pools)
                rows[-1].append((level, counts[level], index * PAGE_TOKENS))
                counts[level] += 1
        self._capacities = [count + 2 for count in counts]
        slots = [self._random.sample(range(room), room) for room in self._capacities]
        return [[(level, slots[level][slot], start) for level, slot, start in row] for row in rows]

    def _make_pools(self) -> None:
        """Fill the pages in use. Others are NaN, or have NaN scales if they are quantized."""
        for level, pool in enumerate(self.pools):
            used = [slot for row in self._pages for which, slot, _ in row if which == level]
            room = self._capacities[level]
            heads, k_dim, v_dim = self.case.kv_heads, self.case.k_dim, self.case.v_dim
            dense = (self._noise(room, heads, PAGE_TOKENS, dim) for dim in (k_dim, v_dim))
            free = mx.array([slot not in used for slot in range(room)])[:, None, None, None]
            arrays = [array for packed in pool.pack(*dense) for array in packed]
            pool.put(
                array
                if array.dtype == mx.uint32
                else mx.where(free, float("nan"), array).astype(self.case.dtype)
                for array in arrays
            )
            mx.eval(pool.arrays())

    def _make_rows(self) -> None:
        case = self.case
        tails = self._random.sample(range(len(case.rows) + 1), len(case.rows))
        self.tail_keys, self.tail_values = (
            self._tail(tails, dim) for dim in (case.k_dim, case.v_dim)
        )
        ends = np.cumsum([len(pages) for pages in self._pages]).tolist()
        splits = Splits.of(ends)
        about = [
            (
                tails[row],
                tokens,
                before * PAGE_TOKENS,
                ends[row] - len(self._pages[row]),
                ends[row],
                self._low(row),
                splits.ends[row - 1] if row else 0,
                splits.ends[row],
            )
            for row, (before, tokens) in enumerate(case.rows)
        ]
        self.rows = mx.array(np.array(about, np.int32))
        padding = np.full((case.padding, 4), (PADDING, 1 << 30, 1 << 30, 0), np.int32)
        self.splits = mx.array(np.concatenate([np.array(splits.array), padding]))
        pages = [page for row in self._pages for page in row] or [(0, 0, 0)]
        padding = np.full((case.padding, 3), 1 << 30, np.int32)
        self.pages = mx.array(np.concatenate([np.array(pages, np.int32), padding]))

    def _tail(self, tails: list[int], dim: int) -> mx.array:
        noise = self._noise(len(tails) + 1, self.case.kv_heads, TAIL_TOKENS, dim)
        filled = np.zeros((len(tails) + 1, 1, TAIL_TOKENS, 1), bool)
        for slot, (_, tokens) in zip(tails, self.case.rows, strict=True):
            filled[slot, :, :tokens] = True
        return mx.where(mx.array(filled), noise, float("nan")).astype(self.case.dtype)

    def shape(self) -> Shape:
        """Return the shape that the kernels are generated for."""
        case = self.case
        sides = [(pool.key_packing, pool.value_packing) for pool in self.pools]
        keys, values = (
            tuple(Side(one.bits, one.group, not one.per_token) for one in side)
            for side in zip(*sides, strict=True)
        )
        return Shape(
            case.dtype, case.k_dim, case.v_dim, case.kv_heads, case.repeats, case.queries,
            keys, values, self.scale, case.keep, case.sinks,
        )  # fmt: skip

    def given(self) -> Attention:
        """Return the kernels' arguments."""
        shape = self.shape()
        keys, values = (
            [(one.bits, one.group, one.along_tokens) for one in side]
            for side in (shape.keys, shape.values)
        )
        return Attention(
            self.queries, self.pages, self.tail_keys, self.tail_values, self.rows, self.splits,
            [array for pool in self.pools for array in pool.arrays()],
            keys, values, (keys, values), self.scale, self.case.keep, self.sinks,
        )  # fmt: skip

    def split(self, language: Language) -> Launch:
        """Return the first launch."""
        return launches.split_launch(self.shape(), LANGUAGES[language], self.given())

    def combine(self, language: Language, parts: Any) -> Launch:
        """Return the second launch, over the first one's output."""
        rows = self.rows, self.queries.shape[0], self.sinks
        return launches.combine_launch(self.shape(), LANGUAGES[language], mx.array(parts), *rows)

    def expected(self) -> np.ndarray:
        """Return dense attention, ``[batch, q_heads, L, v_dim]`` float64, zero for the padding."""
        case = self.case
        queries = _float64(self.queries)
        found = np.zeros((*queries.shape[:3], case.v_dim))
        sinks = None if self.sinks is None else _float64(self.sinks)
        for row, (before, tokens) in enumerate(case.rows):
            keys, values, positions = self._dense(row)
            newest = before * PAGE_TOKENS + tokens - 1
            for number in range(case.queries):
                ago = case.queries - 1 - number
                seen = (positions >= self._low(row) - ago) | (positions < case.keep)
                seen &= positions <= newest - ago
                for head in range(queries.shape[1]):
                    group = head // case.repeats
                    logits = keys[group, seen] @ queries[row, head, number] * self.scale
                    top = logits.max() if sinks is None else max(logits.max(), sinks[head])
                    weights = np.exp(logits - top)
                    total = weights.sum()
                    if sinks is not None:
                        total += np.exp(sinks[head] - top)
                    found[row, head, number] = weights @ values[group, seen] / total
        return found

    def _dense(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a row's keys and values, ``[kv_heads, tokens, dim]``, and their positions."""
        before, tokens = self.case.rows[row]
        keys, values, positions = [], [], []
        for level, slot, start in self._pages[row]:
            pool = self.pools[level]
            sides = (pk.take(side, mx.array([slot])) for side in (pool.keys, pool.values))
            k, v = pool.unpack(*(_widened(side) for side in sides))
            keys.append(_float64(k[0]))
            values.append(_float64(v[0]))
            positions.append(start + np.arange(PAGE_TOKENS))
        tail = int(self.rows[row, 0].item())
        keys.append(_float64(self.tail_keys[tail, :, :tokens]))
        values.append(_float64(self.tail_values[tail, :, :tokens]))
        positions.append(before * PAGE_TOKENS + np.arange(tokens))
        return np.concatenate(keys, 1), np.concatenate(values, 1), np.concatenate(positions)


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), np.float64)


def _widened(packed: pk.Packed) -> pk.Packed:
    """Return packed pages with scales and biases in float32, so that values are not rounded."""
    return tuple(one if one.dtype == mx.uint32 else one.astype(mx.float32) for one in packed)
