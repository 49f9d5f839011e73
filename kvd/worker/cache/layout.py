"""What a model keeps for a sequence: data only. `kvd.worker.serving.probe` finds it out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.scheme import LayerGeometry


class Access(Enum):
    """How a model reads the keys and values of one attention kind."""

    PAGES = "pages"
    """Through kvd's attention, directly from the pages."""
    RECTANGLES = "dequantize-on-read"
    """As plain arrays that are dequantized for each step, because the model computes with them."""


@dataclass(frozen=True)
class AttentionPart:
    """Keys and values of one attention layer."""

    kind: Kind
    geometry: LayerGeometry


@dataclass(frozen=True)
class StatePart:
    """A recurrent layer's state: arrays of fixed size, each ``[1, ...]`` for one sequence."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @property
    def nbytes(self) -> int:
        return sum(
            mx.zeros(shape, dtype).nbytes
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


@dataclass(frozen=True)
class UnusedPart:
    """A cache that the model creates and never writes to."""


Part = AttentionPart | StatePart | UnusedPart


@dataclass(frozen=True)
class Entry:
    """One element of the list of caches that a model takes."""

    parts: tuple[Part, ...]
    composed: bool = False
    """Whether the parts are in one `CacheList`."""


@dataclass(frozen=True)
class Layout:
    """Everything that a model keeps for a sequence."""

    entries: tuple[Entry, ...]
    dtype: mx.Dtype

    def attention(self) -> Iterator[tuple[int, AttentionPart]]:
        for index, entry in enumerate(self.entries):
            for part in entry.parts:
                if isinstance(part, AttentionPart):
                    yield index, part

    def states(self) -> Iterator[StatePart]:
        for entry in self.entries:
            for part in entry.parts:
                if isinstance(part, StatePart):
                    yield part

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(dict.fromkeys(part.kind for _, part in self.attention()))
