"""Packed keys or values of some pages: quantizing, dequantizing, and products with them.

Two orientations, named by what lies along a group:

* *per channel*: ``[pages, heads, dim, 64]``, groups along the 64 tokens;
* *per token*: ``[pages, heads, 64, dim]``, groups along the channels.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.cache.scheme import PAGE_TOKENS

GROUP = PAGE_TOKENS


Packed = tuple[mx.array, ...]
"""Words, scales and biases of pages; at 16 bits the dense elements, and nothing else.

Words are ``[pages, heads, a, b * bits / 32]`` uint32 (or ``[pages, heads, a, b]`` dense), scales and
biases ``[pages, heads, a, b / 64]``.
"""


def empty(pages: int, heads: int, rows: int, columns: int, bits: int, dtype: mx.Dtype) -> Packed:
    """Return zeroed storage for ``pages`` pages whose groups run along ``columns``."""
    if bits == 16:
        return (mx.zeros((pages, heads, rows, columns), dtype),)
    groups = (pages, heads, rows, columns // GROUP)
    return (
        mx.zeros((pages, heads, rows, columns * bits // 32), mx.uint32),
        mx.zeros(groups, dtype),
        mx.zeros(groups, dtype),
    )


def pack(dense: mx.array, bits: int) -> Packed:
    """Quantize ``[pages, heads, a, b]`` along its last axis."""
    if bits == 16:
        return (dense,)
    words, scales, biases = mx.quantize(dense, group_size=GROUP, bits=bits)
    return words, scales, biases


def unpack(packed: Packed, bits: int) -> mx.array:
    """Return the dense ``[pages, heads, a, b]`` that ``packed`` stands for."""
    if bits == 16:
        return packed[0]
    words, scales, biases = packed
    return mx.dequantize(words, scales, biases, group_size=GROUP, bits=bits)


def take(packed: Packed, slots: mx.array) -> Packed:
    """Return copies of the pages at ``slots``."""
    return tuple(array[slots] for array in packed)


def page_product(
    x: mx.array, packed: Packed, bits: int, slots: mx.array, *, transpose: bool
) -> mx.array:
    """Multiply ``x`` ``[n, heads, r, k]`` with the pages at ``slots`` ``[n]``.

    Returns ``x @ page`` (``transpose`` false, the page is ``[k, m]``) or ``x @ page.T`` (the page
    is ``[m, k]``): ``[n, heads, r, m]``. The packed pages are gathered, never a dense copy; both
    operands have the same batch axes, because MLX on CUDA is wrong where it has to broadcast one.
    """
    page = take(packed, slots)
    if bits == 16:
        return x @ (page[0].swapaxes(-1, -2) if transpose else page[0])
    words, scales, biases = page
    return mx.quantized_matmul(
        x, words, scales, biases, transpose=transpose, group_size=GROUP, bits=bits
    )
