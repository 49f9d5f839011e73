"""What pages of keys and values cost: pure arithmetic, the same for workers and for forecasts.

A page holds the keys and values of 64 tokens in one layer. MLX's affine quantization stores, for
every group of elements, a scale and a bias in the activations' dtype.

* Keys are quantized **per channel**: the page is full when it is quantized, so groups run along
  its 64 tokens (KIVI, arXiv 2402.02750). Every head size fits.
* Values are quantized **per token** where the head size is a multiple of the value group, since
  then a page's product with the attention weights needs no reshuffling; else per channel.
* 16 bits stand for "not quantized": the activations' dtype as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import InvalidRequest
from protocol.schemes import Scheme

if TYPE_CHECKING:
    from protocol.types import KVSpec

PAGE_TOKENS = 64
"""Tokens in a page."""
TAIL_TOKENS = 2 * PAGE_TOKENS
"""Capacity of a row's tail: up to 127 tokens, and the one that commits the oldest 64 to a page."""
SLAB_PAGES = 64
"""Pools grow by at least this many pages, because growing copies them."""
FIRST_ROWS = 4
"""Rows whose tails a worker's first grant covers."""


@dataclass(frozen=True)
class Packing:
    """How one side of a layer's pages is stored."""

    bits: int
    group: int = PAGE_TOKENS
    """Elements that share a scale and a bias; says nothing at 16 bits."""
    per_token: bool = False
    """Whether groups run along a token's channels; else along the page's tokens."""

    def page_bytes(self, dim: int, itemsize: int) -> int:
        """Bytes of one head's page of ``dim`` channels, with dense elements of ``itemsize``."""
        elements = dim * PAGE_TOKENS
        if self.bits == 16:
            return elements * itemsize
        return elements * self.bits // 8 + elements // self.group * 2 * itemsize


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's keys and values: heads, head sizes, bytes of one dense element.

    ``v_dim`` is 0 where a model keeps all that it needs on the key side.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int = 4

    def keys(self, scheme: Scheme) -> Packing:
        """Return how a scheme stores this layer's keys."""
        return Packing(scheme.k_bits, scheme.k_group)

    def values(self, scheme: Scheme) -> Packing:
        """Return how a scheme stores this layer's values."""
        if scheme.v_bits == 16 or self.v_dim == 0:  # there is nothing to quantize
            return Packing(16, per_token=True)
        if self.v_dim % scheme.v_group == 0:
            return Packing(scheme.v_bits, scheme.v_group, per_token=True)
        return Packing(scheme.v_bits, min(scheme.v_group, PAGE_TOKENS))

    def dense_bytes(self, tokens: int) -> int:
        """Bytes of that many tokens' keys and values, not quantized."""
        return self.kv_heads * (self.k_dim + self.v_dim) * tokens * self.itemsize

    def page_bytes(self, scheme: Scheme) -> int:
        """Bytes of one page of this layer: exactly what its arrays hold."""
        return self.kv_heads * (
            self.keys(scheme).page_bytes(self.k_dim, self.itemsize)
            + self.values(scheme).page_bytes(self.v_dim, self.itemsize)
        )


def full_pages(length: int) -> int:
    """Return how many pages a row of this length has: its newest 64 to 127 tokens stay dense.

    A function of the length alone, so that what a token attends to never depends on when pools
    are flushed or who shares the batch.
    """
    return max(0, length // PAGE_TOKENS - 1)


def schemes_of(spec: KVSpec) -> list[Scheme]:
    """Return the schemes of a model's pages, the one that new rows start with first.

    Each takes fewer bytes than the one before it, and on neither side more.
    """
    return [spec.scheme, *spec.steps]


def floors_of(spec: KVSpec, layers: int) -> list[Scheme | None]:
    """Return each layer's floor, None where it may go all the way down.

    A layer's scheme is `Scheme.at_least` its floor on every level. Raises `InvalidRequest` for a
    layer that the model does not have, or has been named twice.
    """
    floors: list[Scheme | None] = [None] * layers
    for layer, name in spec.floors.items():
        if not -layers <= layer < layers:
            raise InvalidRequest(
                f"kv.floors names layer {layer}; the model's layers are 0 to {layers - 1}, or -1 "
                f"to -{layers} from the end",
                field="kv.floors",
            )
        if floors[layer] is not None:
            raise InvalidRequest(f"kv.floors names layer {layer} twice", field="kv.floors")
        floors[layer] = spec.scheme_of(name)
    return floors


def max_pages(
    length: int,
    *,
    window: int | None = None,
    keep: int = 0,
    chunk: int | None = None,
    step: int = 0,
) -> int:
    """Return the most pages that a row ever holds on its way to ``length`` tokens.

    `full_pages`, and one that is written before its time. ``window``, ``keep`` and ``chunk``: what
    a layer attends to (`kvd.worker.cache.attention_kind`); without, everything. Pages fall out once in 64
    tokens, or behind ``step`` prefilled ones.
    """
    pages = length // PAGE_TOKENS
    if window is None and chunk is None:
        return pages
    reach = chunk or (window or 0) - keep
    kept = -(-keep // PAGE_TOKENS)
    return min(pages, kept + -(-reach // PAGE_TOKENS) + step // PAGE_TOKENS + 3)
