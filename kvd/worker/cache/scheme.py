"""How pages are stored and what they cost: pure arithmetic, no tensors.

A page holds the keys and values of 64 tokens in one layer. MLX's affine quantization stores, for
every group of 64 elements, a scale and a bias in the activations' dtype.

* Keys are quantized **per channel**: the page is full when it is quantized, so a group is one
  channel of one head over the page's 64 tokens (KIVI, arXiv 2402.02750). Every head size fits.
* Values are quantized **per token** where the head size is a multiple of the group, since then a
  page's product with the attention weights needs no reshuffling; else per channel like the keys.
* 16 bits stand for "not quantized": the activations' dtype as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PAGE_TOKENS = 64
"""Tokens in a page, and elements in a quantization group."""

BITS = (2, 3, 4, 5, 6, 8, 16)


@dataclass(frozen=True)
class Scheme:
    """Bits of keys and of values."""

    k_bits: int = 8
    v_bits: int = 8

    def __post_init__(self) -> None:
        for side, bits in (("key", self.k_bits), ("value", self.v_bits)):
            if bits not in BITS:
                raise ValueError(f"{side} bits must be one of {BITS}, not {bits}")

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read ``k8v4``."""
        match = re.fullmatch(r"k(\d+)v(\d+)", text.strip().lower())
        if match is None:
            raise ValueError(f"a KV scheme looks like k8v4, not {text!r}")
        return cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        """Such as ``k8v4``."""
        return f"k{self.k_bits}v{self.v_bits}"


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's keys and values: heads, head sizes, bytes of one dense element."""

    kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int = 4

    @property
    def values_per_token(self) -> bool:
        """Whether a token's values fill whole groups."""
        return self.v_dim % PAGE_TOKENS == 0

    def dense_bytes(self, tokens: int) -> int:
        """Bytes of that many tokens' keys and values, not quantized."""
        return self.kv_heads * (self.k_dim + self.v_dim) * tokens * self.itemsize

    def page_bytes(self, scheme: Scheme) -> int:
        """Bytes of one page of this layer."""
        return self.kv_heads * (
            _side_bytes(self.k_dim, scheme.k_bits, self.itemsize)
            + _side_bytes(self.v_dim, scheme.v_bits, self.itemsize)
        )


def _side_bytes(dim: int, bits: int, itemsize: int) -> int:
    elements = dim * PAGE_TOKENS
    if bits == 16:
        return elements * itemsize
    return elements * bits // 8 + elements // PAGE_TOKENS * 2 * itemsize


def full_pages(length: int) -> int:
    """Return how many pages a row of this length has: its newest 64 to 127 tokens stay dense.

    A function of the length alone, so that what a token attends to never depends on when pools
    are flushed or who shares the batch.
    """
    return max(0, length // PAGE_TOKENS - 1)
