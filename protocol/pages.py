"""Sizes of KV pages in bytes, for workers and forecasts.

A page holds the keys and values of 64 tokens in one layer. MLX's affine quantization stores a
scale and a bias for every group of elements, in the dtype of the activations.

* Keys are quantized **per channel**: groups run along the page's 64 tokens (KIVI, arXiv
  2402.02750). Only full pages are quantized, so this works for every head size.
* Values are quantized **per token**, so that attention weights multiply a page without a
  transposition. If the head size is not a multiple of the value group, they are quantized per
  channel.
* 16 bits mean "not quantized". Elements keep the dtype of the activations, which may be wider.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.schemes import Scheme

PAGE_TOKENS = 64
TAIL_TOKENS = 2 * PAGE_TOKENS
"""Capacity of a row's tail, its newest tokens. The 128th token commits the oldest 64 to a page."""
SLAB_PAGES = 64
"""Minimum growth of a pool, in pages: each growth copies the whole pool."""
FIRST_ROWS = 4
"""Number of rows whose tails fit in a worker's first grant."""


@dataclass(frozen=True)
class Packing:
    """How the keys or the values of a layer's pages are stored."""

    bits: int
    group: int = PAGE_TOKENS
    """Elements that share a scale and a bias; ignored at 16 bits."""
    per_token: bool = False
    """True: groups run along the channels of a token. False: along the 64 tokens of a channel."""

    def page_bytes(self, dim: int, itemsize: int) -> int:
        """Return the bytes of one head's keys or values; a dense element has ``itemsize`` bytes."""
        elements = dim * PAGE_TOKENS
        if self.bits == 16:
            return elements * itemsize
        return elements * self.bits // 8 + elements // self.group * 2 * itemsize


@dataclass(frozen=True)
class LayerGeometry:
    """Number and sizes of one layer's KV heads; ``itemsize``: bytes of a dense element.

    ``v_dim`` is 0 for models that cache one tensor, stored as keys, such as MLA's latents.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int = 4

    def keys(self, scheme: Scheme) -> Packing:
        return Packing(scheme.k_bits, scheme.k_group)

    def values(self, scheme: Scheme) -> Packing:
        if scheme.v_bits == 16 or self.v_dim == 0:  # values stay dense, or there are none
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
    """Return how many pages a row of this length reads; its newest 64 to 127 tokens stay dense.

    The number depends on the length alone. Attention therefore gives the same result whenever pages
    are written, and whatever other rows are in the batch.
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

    Without a window or chunk these are the pages of `full_pages`, and one that is written ahead
    while its tokens are still in the tail. ``window`` is the number of tokens that a layer attends
    to: the first ``keep`` tokens of the row, and the newest ones. ``chunk`` is the size of
    attention chunks. Pages outside of the window or chunk are freed after every 64 decoded tokens,
    and after every ``step`` prefilled tokens.
    """
    pages = length // PAGE_TOKENS
    if window is None and chunk is None:
        return pages
    reach = chunk or (window or 0) - keep
    kept = -(-keep // PAGE_TOKENS)
    return min(pages, kept + -(-reach // PAGE_TOKENS) + step // PAGE_TOKENS + 3)
