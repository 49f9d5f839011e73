"""The backend that runs decode attention as GPU kernels.

Its prefill uses plain operations, except in whole layers (`kvd.worker.attention.fused_prefill`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import mlx.core as mx

from kvd.worker.attention.kernels.append import PIECE
from kvd.worker.attention.kernels.arguments import (
    SPLIT_KEYS,
    Append,
    Attend,
    Attention,
    Heads,
    Pack,
    PassTokens,
    PutTails,
    Rotate,
    Rotation,
    Spread,
    Tiling,
    Unpack,
)
from kvd.worker.cache.backend import pools_of, rows_of, schemes_of
from kvd.worker.cache.packed import Packed
from kvd.worker.cache.padded_sizes import padded_length, padded_work
from kvd.worker.cache.page_tables import PageList
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.splits import Splits
from protocol.pages import TAIL_TOKENS

if TYPE_CHECKING:
    from kvd.worker.cache.attention_kind import Kind
    from kvd.worker.cache.layer import LayerStore
    from kvd.worker.cache.rows import Row
    from kvd.worker.cache.steps import DecodeStep, PrefillStep
    from kvd.worker.cache.store import KVStore

OWN_BUFFERS = 7
"""Arrays that the split kernel (`kernels.decode`) reads or writes besides the pools."""
MIN_SPLITS = 16
"""Minimum length of a compiled step's list of splits, with padding. A shorter list would take as
long to process."""


class Kernels(Protocol):
    """The interface of `kvd.worker.attention.kernels.fused.Fused`."""

    launches: int
    """Kernels that were added to graphs so far, or replayed by compiled steps."""

    def decode_attention(self, given: Attention) -> mx.array:
        """Attend the newest token of each row; return ``[batch, q_heads, 1, v_dim]``, lazy."""

    def append(self, given: Append) -> tuple[mx.array, mx.array]:
        """Return tails that contain the new token of each row; lazy."""

    def rotate(self, given: Rotate) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries ``[batch, q_heads, 1, k_dim]`` after norm and RoPE, and tails; lazy."""

    # What prefill passes launch; lazy.

    def spread(self, given: Spread) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values after norm and RoPE, ``[batch, heads, dim]``."""

    def pack(self, given: Pack) -> list[mx.array]:
        """Return the arrays of packed pages, then tokens of keys and values."""

    def unpack(self, given: Unpack) -> mx.array:
        """Write dense keys and values; return an array on which their readers depend."""

    def tiling(self, given: Heads) -> Tiling | None:
        """Return how `attend` divides chunks; None: there is no such kernel."""

    def attend(self, given: Attend) -> mx.array:
        """Attend chunks; return ``[tokens, q_heads * v_dim]``."""

    def put_tails(self, given: PutTails) -> tuple[mx.array, mx.array]:
        """Return tails with new tokens at their front."""


@dataclass(frozen=True, eq=False)
class RotarySettings:
    """The norms and the RoPE that a layer applies to its queries and keys."""

    rotation: Rotation
    q_heads: int
    frequencies: mx.array
    """``[dims / 2]`` float32, radians per position."""
    weights: tuple[mx.array, mx.array] | None
    """Norm weights of queries and keys; None if the layer has no such norms."""


@dataclass(frozen=True)
class FusedBackend:
    """Runs decode attention as GPU kernels."""

    kernels: Kernels
    most_buffers: int
    """Most arrays that one kernel may read and write on this device."""
    split_keys: int = SPLIT_KEYS
    """Fewest keys of a split of a prefill chunk."""

    def decode(
        self, layers: Sequence[LayerStore], kind: Kind, rows: Sequence[Row], pages: PageList
    ) -> FusedStep | None:
        if len(pages.levels) > 1 and not self.can_read(layers, pages.levels):
            return None
        return FusedStep.of(self.kernels, kind, rows, pages)

    def can_read(self, layers: Sequence[LayerStore], levels: Sequence[int]) -> bool:
        """Return whether one kernel can read a layer's pages of all these levels."""
        arrays = max(sum(layer.pools[level].array_count for level in levels) for layer in layers)
        return OWN_BUFFERS + arrays <= self.most_buffers

    def prefill(self, _kind: Kind, _step: PrefillStep) -> None:
        """Return None, so that plain operations attend to the chunk."""

    def pack_tails(
        self, layer: LayerStore, level: int, slots: Sequence[int]
    ) -> tuple[Packed, Packed] | None:
        """See `Backend.pack_tails`; None: a head's vector is no multiple of 16 bytes."""
        tails, geometry = (layer.tail_keys, layer.tail_values), layer.geometry
        pool = layer.pools[level]
        dims = geometry.k_dim, geometry.v_dim
        if any(not dim or dim * layer.dtype.size % PIECE for dim in dims):
            return None
        keys, values = (
            tail.reshape(-1, geometry.kv_heads, dim) for tail, dim in zip(tails, dims, strict=True)
        )  # stand for the arrays of a pass, which no place refers to
        tokens = PassTokens(keys, values, *tails)
        places = _first_places(tuple(slots))
        packed = self.kernels.pack(Pack(tokens, places, schemes_of([pool]), places[:1]))
        ends = len(pool.keys)
        return tuple(packed[:ends]), tuple(packed[ends:-2])

    def launched(self, more: int = 0) -> int:
        """Add ``more`` kernels that a compiled step launched; return the count so far."""
        self.kernels.launches += more
        return self.kernels.launches


@dataclass(frozen=True)
class FusedStep:
    """A decode step's arguments for the kernels: those that are the same in all layers."""

    kernels: Kernels
    kind: Kind
    pages: PageList
    splits: Splits
    rows: mx.array
    """``[rows, 8]`` int32: the six numbers of `rows_of`, then the indices of the row's first split
    and after its last."""
    moves_tails: ClassVar[bool] = True

    @staticmethod
    def of(kernels: Kernels, kind: Kind, rows: Sequence[Row], pages: PageList) -> FusedStep:
        splits = pages.splits
        bounds = zip(rows_of(kind, rows, pages), (0, *splits.ends), splits.ends, strict=False)
        row_data = [(*row, first, end) for row, first, end in bounds]
        return FusedStep(kernels, kind, pages, splits, mx.array(row_data, mx.int32))

    def append(self, layer: LayerStore, step: DecodeStep, keys: mx.array, values: mx.array) -> None:
        tails, places = (layer.tail_keys, layer.tail_values), (step.token_places, step.token_rows)
        given = Append(*tails, keys, values, *places)
        layer.tail_keys, layer.tail_values = self.kernels.append(given)

    def rotate(
        self, layer: LayerStore, step: DecodeStep, qkv: mx.array, how: RotarySettings
    ) -> mx.array:
        """Append keys that still need RMS norm and RoPE; return the rotated queries; lazy.

        ``qkv``: queries, keys and values side by side, as the layer's joined projection returns
        them.
        """
        tails, places = (layer.tail_keys, layer.tail_values), (step.token_places, step.token_rows)
        rotation = how.q_heads, step.offsets, how.frequencies, how.weights
        given = Rotate(how.rotation, qkv, *rotation, *tails, *places)
        rotated, layer.tail_keys, layer.tail_values = self.kernels.rotate(given)
        return rotated

    def attend(
        self, queries: mx.array, layer: LayerStore, scale: float, sinks: mx.array | None
    ) -> mx.array:
        return self.kernels.decode_attention(
            Attention(
                queries,
                self.pages.array,
                layer.tail_keys,
                layer.tail_values,
                self.rows,
                self.splits.array,
                *pools_of(layer, self.pages),
                schemes_of(layer.pools),
                scale,
                self.kind.keep,
                sinks,
            )
        )

    def padded(self) -> FusedStep:
        # Padding splits cost work, unlike padding pages, so fewer are added.
        return replace(
            self,
            pages=self.pages.padded(padded_length(self.pages.count)),
            splits=self.splits.padded(padded_work(max(MIN_SPLITS, self.splits.count))),
        )

    def shapes(self, step: DecodeStep) -> tuple[Any, ...]:
        lists = self.pages.array.shape[0], self.splits.array.shape[0]
        return "fused", step.token_rows is None, *lists

    def arrays(self, step: DecodeStep) -> list[mx.array]:
        token_rows = [] if step.token_rows is None else [step.token_rows]
        lists = self.rows, self.pages.array, self.splits.array
        return [step.offsets, step.token_places, *lists, *token_rows]

    def with_arrays(self, step: DecodeStep, given: Iterator[mx.array]) -> DecodeStep:
        offsets, places, rows, pages, splits = (next(given) for _ in range(5))
        page_list, split_list = self.pages.with_array(pages), self.splits.with_array(splits)
        return replace(
            step,
            token_places=places,
            token_rows=None if step.token_rows is None else next(given),
            backend=replace(self, rows=rows, pages=page_list, splits=split_list),
            shared={"offsets": offsets},
        )


@contextmanager
def short_splits(stores: Iterable[KVStore]) -> Iterator[None]:
    """Let chunks have splits of one page, so that a short check covers these too."""
    backends = [(store, store.backend) for store in stores]
    for store, backend in backends:
        if isinstance(backend, FusedBackend):
            store.backend = replace(backend, split_keys=PAGE_TOKENS)
    try:
        yield
    finally:
        for store, backend in backends:
            store.backend = backend


@lru_cache(8)
def _first_places(slots: tuple[int, ...]) -> mx.array:
    """Return the places of the tails' first 64 tokens (`kernels.pack`), the same for all layers."""
    places = [~(slot * TAIL_TOKENS + token) for slot in slots for token in range(PAGE_TOKENS)]
    return mx.array(places, mx.int32)
