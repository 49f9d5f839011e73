"""Packed keys or values of pages: quantization, dequantization, and matrix products.

There are two orientations, named by the axis along which values share a scale:

* *per channel*: ``[pages, heads, dim, 64]``, groups along the 64 tokens;
* *per token*: ``[pages, heads, 64, dim]``, groups along the channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import mlx.core as mx

from kvd.worker.cache.scheme import Packing
from kvd.worker.device import on_cpu, on_cuda

Packed = tuple[mx.array, ...]
"""Words, scales and biases of pages; at 16 bits only the dense elements.

Dense elements are ``[pages, heads, a, b]``. Words are ``[pages, heads, a, b * bits / 32]`` uint32,
scales and biases ``[pages, heads, a, b / group]``.
"""


MOST_RUNS = 8
"""Most runs of slots that are read by slices. Each of several takes a kernel per array."""
CUDA_MOST_RUNS = 2
"""Replaces `MOST_RUNS` on CUDA, where launching kernels takes longer than running them. Of a prompt
of 16,384 tokens, about a quarter of the kernels joined runs of pages (H200)."""


@dataclass(frozen=True)
class PageIndex:
    """Pairs rows of an operand with pages, for each head: ``[pages, heads]`` uint32."""

    left: mx.array
    """Indices into the operand's ``n * heads``."""
    right: mx.array
    """Indices into the pool's ``pages * heads``."""


def empty(
    pages: int, heads: int, rows: int, columns: int, packing: Packing, dtype: mx.Dtype
) -> Packed:
    """Return zeroed storage for ``pages`` pages whose groups run along ``columns``."""
    if packing.bits == 16:
        return (mx.zeros((pages, heads, rows, columns), dtype),)
    groups = (pages, heads, rows, columns // packing.group)
    return (
        mx.zeros((pages, heads, rows, columns * packing.bits // 32), mx.uint32),
        mx.zeros(groups, dtype),
        mx.zeros(groups, dtype),
    )


def pack(dense: mx.array, packing: Packing) -> Packed:
    """Quantize ``[pages, heads, a, b]`` along its last axis."""
    if packing.bits == 16:
        return (dense,)
    words, scales, biases = mx.quantize(dense, group_size=packing.group, bits=packing.bits)
    return words, scales, biases


def unpack(packed: Packed, packing: Packing) -> mx.array:
    if packing.bits == 16:
        return packed[0]
    words, scales, biases = packed
    return mx.dequantize(words, scales, biases, group_size=packing.group, bits=packing.bits)


class Slots:
    """Slots of pages to read, or places of tokens, known on the host.

    Few runs of successive slots are read by slices. A single run is then not copied at all; MLX's
    gathers on CUDA copy it with a fraction of the memory's bandwidth.
    """

    def __init__(self, numbers: Sequence[int], most_runs: int | None = None) -> None:
        self._numbers = numbers
        self._most_runs = most_runs

    @cached_property
    def most_runs(self) -> int:
        """Most runs that are read by slices, by default as many as this device should read."""
        if self._most_runs is not None:
            return self._most_runs
        return CUDA_MOST_RUNS if on_cuda() else MOST_RUNS

    @cached_property
    def runs(self) -> list[slice]:
        """The runs of successive slots, in order."""
        return runs_of(self._numbers)

    @cached_property
    def array(self) -> mx.array:
        """The slots, ``[pages]`` int32."""
        return mx.array([*self._numbers], mx.int32)

    def some(self, which: Sequence[int]) -> Slots:
        return Slots([self._numbers[index] for index in which], self._most_runs)


def take(packed: Packed, slots: mx.array | Slots, heads: slice = slice(None)) -> Packed:
    """Return some pages of some heads; lazy."""
    if isinstance(slots, mx.array):
        return tuple(array[:, heads][slots] for array in packed)
    if len(slots.runs) > slots.most_runs:
        return take(packed, slots.array, heads)
    return tuple(joined([array[run, heads] for run in slots.runs]) for array in packed)


def entries(array: mx.array, which: Sequence[int], axis: int = 0) -> mx.array:
    """Return the entries at ascending indices along an axis, by slices; lazy.

    For few runs of successive indices. MLX on CUDA compiles a module for gathers of each dtype, and
    none for slices.
    """
    before = (slice(None),) * axis
    parts = [array[(*before, run)] for run in runs_of(which)]
    return joined(parts, axis) if parts else array[(*before, slice(0))]


def runs_of(which: Sequence[int]) -> list[slice]:
    """Return the runs of successive indices, in order."""
    starts = [at for at, index in enumerate(which) if not at or index != which[at - 1] + 1]
    ends = pairwise([*starts, len(which)])
    return [slice(which[at], which[end - 1] + 1) for at, end in ends]


def joined(parts: list[mx.array], axis: int = 0) -> mx.array:
    """Concatenate arrays, of which there is at least one."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis)


def page_product(
    x: mx.array, packed: Packed, packing: Packing, index: PageIndex, *, transpose: bool
) -> mx.array:
    """Multiply rows of ``x`` with pages: ``x @ page``, or ``x @ page.T`` if ``transpose``.

    ``x`` is ``[n, heads, r, k]``; returns ``[pages, heads, r, m]``. Pages are read in place.
    """
    if packing.bits == 16 and packed[0].dtype != x.dtype:
        # With mixed dtypes MLX would convert the whole pool.
        return page_product_by_copy(x, packed, packing, index, transpose=transpose)
    flat = x.flatten(0, 1)
    pages = tuple(array.flatten(0, 1) for array in packed)
    if packing.bits == 16:
        dense = pages[0].swapaxes(-1, -2) if transpose else pages[0]
        return mx.gather_mm(flat, dense, lhs_indices=index.left, rhs_indices=index.right)
    words, scales, biases = pages
    return mx.gather_qmm(
        flat,
        words,
        scales,
        biases,
        lhs_indices=index.left,
        rhs_indices=index.right,
        transpose=transpose,
        group_size=packing.group,
        bits=packing.bits,
    )


def page_product_by_copy(
    x: mx.array, packed: Packed, packing: Packing, index: PageIndex, *, transpose: bool
) -> mx.array:
    """Compute `page_product` from copies of the pages, for devices without gathered products."""
    # Both operands get the same batch axes: MLX on CUDA returns wrong results if it broadcasts one.
    left, right = (
        x.flatten(0, 1)[index.left],
        take(tuple(array.flatten(0, 1) for array in packed), index.right),
    )
    if packing.bits == 16:
        dense = right[0].astype(x.dtype)
        return left @ (dense.swapaxes(-1, -2) if transpose else dense)
    words, scales, biases = right
    return mx.quantized_matmul(
        left,
        words,
        scales,
        biases,
        transpose=transpose,
        group_size=packing.group,
        bits=packing.bits,
    )


def unpacking_bytes(bits: int, itemsize: int) -> int:
    """Return the bytes per element that `mx.dequantize` takes besides its input and output.

    On the CPU, dequantizing is a graph of 32-bit operations: with one temporary value per element,
    or one per bit if elements cross word boundaries (measured, mlx 0.32.4).
    """
    if bits == 16 or not on_cpu():
        return 0
    entries = 1 if 32 % bits == 0 else bits
    return 4 * entries + (0 if itemsize == 4 else 4)
