"""Sizes of KV pages in bytes, for workers and forecasts.

A page holds the keys and values of 64 tokens in one layer. MLX's affine quantization stores a
scale and a bias for every group of elements, in the dtype of the activations.

* Keys are quantized **per channel**. A page is full when it is quantized, so groups run along its
  64 tokens (KIVI, arXiv 2402.02750), and every head size fits.
* Values are quantized **per token** if the head size is a multiple of the value group. The product
  of such a page with the attention weights needs no transposition. Other values are quantized per
  channel.
* 16 bits mean "not quantized": the dtype of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.schemes import Scheme

PAGE_TOKENS = 64
TAIL_TOKENS = 2 * PAGE_TOKENS
"""Capacity of a row's tail: up to 127 tokens, and the one that commits the oldest 64 to a page."""
SLAB_PAGES = 64
"""Pools grow by at least this many pages, because growing copies them."""
FIRST_ROWS = 4
"""Rows whose tails a worker's first grant covers."""


@dataclass(frozen=True)
class Packing:
    """How the keys or the values of a layer's pages are stored."""

    bits: int
    group: int = PAGE_TOKENS
    """Elements that share a scale and a bias; ignored at 16 bits."""
    per_token: bool = False
    """Whether groups run along a token's channels, or along the page's tokens."""

    def page_bytes(self, dim: int, itemsize: int) -> int:
        """Return the bytes of one head's page; a dense element has ``itemsize`` bytes."""
        elements = dim * PAGE_TOKENS
        if self.bits == 16:
            return elements * itemsize
        return elements * self.bits // 8 + elements // self.group * 2 * itemsize


@dataclass(frozen=True)
class LayerGeometry:
    """Heads, head sizes and bytes of a dense element in one layer.

    ``v_dim`` is 0 for models that keep everything on the key side.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int = 4

    def keys(self, scheme: Scheme) -> Packing:
        return Packing(scheme.k_bits, scheme.k_group)

    def values(self, scheme: Scheme) -> Packing:
        if scheme.v_bits == 16 or self.v_dim == 0:  # there is nothing to quantize
            return Packing(16, per_token=True)
        if self.v_dim % scheme.v_group == 0:
            return Packing(scheme.v_bits, scheme.v_group, per_token=True)
        return Packing(scheme.v_bits, min(scheme.v_group, PAGE_TOKENS))

    def dense_bytes(self, tokens: int) -> int:
        return self.kv_heads * (self.k_dim + self.v_dim) * tokens * self.itemsize

    def page_bytes(self, scheme: Scheme) -> int:
        return self.kv_heads * (
            self.keys(scheme).page_bytes(self.k_dim, self.itemsize)
            + self.values(scheme).page_bytes(self.v_dim, self.itemsize)
        )


def full_pages(length: int) -> int:
    """Return the pages of a row of this length; its newest 64 to 127 tokens stay dense.

    Depends on the length alone, so that attention depends neither on the time of a flush nor on
    the other rows of the batch.
    """
    return max(0, length // PAGE_TOKENS - 1)


def max_pages(
    length: int,
    *,
    window: int | None = None,
    keep: int = 0,
    chunk: int | None = None,
    step: int = 0,
) -> int:
    """Return the maximum pages that a row holds while it grows to ``length`` tokens.

    This is `full_pages` plus one page that is written early. ``window``, ``keep`` and ``chunk``
    limit what a layer attends to (`kvd.worker.cache.attention_kind`). Pages leave the window once
    in 64 tokens, or after ``step`` prefilled tokens.
    """
    pages = length // PAGE_TOKENS
    if window is None and chunk is None:
        return pages
    reach = chunk or (window or 0) - keep
    kept = -(-keep // PAGE_TOKENS)
    return min(pages, kept + -(-reach // PAGE_TOKENS) + step // PAGE_TOKENS + 3)
