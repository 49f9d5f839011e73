"""The backend that attends with the library: its arrays of rows and of pages.

Everything is on the host except two small arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx

from kvd.worker.cache.backend import pools_of, rows_of
from kvd.worker.cache.padded_sizes import padded_length
from kvd.worker.cache.page_list import PageList

if TYPE_CHECKING:
    from kvd.worker.cache.attention_kind import Kind
    from kvd.worker.cache.layer import Chunk, LayerStore
    from kvd.worker.cache.rows import Row
    from kvd.worker.cache.steps import DecodeStep


@dataclass(frozen=True)
class Library:
    """Runs attention with kvd's own CPU operations, in all steps."""

    module: ModuleType

    def decode(
        self, _: Sequence[LayerStore], kind: Kind, rows: Sequence[Row], pages: PageList
    ) -> NativeStep:
        return NativeStep.of(self.module, kind, rows, pages)

    def prefill(self, kind: Kind, row: Row, count: int) -> NativePrefill:
        return NativePrefill.of(self.module, kind, row, count)

    def launched(self, _: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class NativeStep:
    """A decode step for the library."""

    library: ModuleType
    kind: Kind
    pages: PageList
    rows: mx.array
    """``[rows, 6]`` int32, from `rows_of`."""
    moves_tails: ClassVar[bool] = False

    @staticmethod
    def of(library: ModuleType, kind: Kind, rows: Sequence[Row], pages: PageList) -> NativeStep:
        """Describe rows whose lengths include the new token."""
        return NativeStep(library, kind, pages, mx.array(rows_of(kind, rows, pages), mx.int32))

    def append(self, layer: LayerStore, _: DecodeStep, keys: mx.array, values: mx.array) -> None:
        """Write one token per row into its tail, ``[rows or more, heads, 1, dim]``."""
        layer.tail_keys, layer.tail_values = self.library.append(
            layer.tail_keys, layer.tail_values, keys, values, self.rows
        )

    def attend(
        self, queries: mx.array, layer: LayerStore, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend one query per row, like `kvd.worker.attention.decode.decode_attention`."""
        found: mx.array = self.library.decode_attention(
            queries,
            self.pages.array,
            layer.tail_keys,
            layer.tail_values,
            self.rows,
            *pools_of(layer, self.pages),
            scale,
            self.kind.keep,
            sinks,
        )
        return found

    def padded(self) -> NativeStep:
        """Return the step with a list of pages of one of few lengths."""
        return replace(self, pages=self.pages.padded(padded_length(self.pages.count)))

    def shapes(self, _: DecodeStep) -> tuple[Any, ...]:
        """Return the sizes that determine the shapes of `arrays`."""
        return "native", self.pages.array.shape[0]

    def arrays(self, step: DecodeStep) -> list[mx.array]:
        """Return the arrays that a compiled step reads, besides tails and pools."""
        return [step.offsets, self.rows, self.pages.array]

    def with_arrays(self, step: DecodeStep, given: Iterator[mx.array]) -> DecodeStep:
        offsets, rows, pages = (next(given) for _ in range(3))
        backend = replace(self, rows=rows, pages=self.pages.with_array(pages))
        return replace(step, backend=backend, shared={"offsets": offsets})


@dataclass(frozen=True)
class NativePrefill:
    """A chunk of one row's prompt for the library."""

    library: ModuleType
    kind: Kind
    pages: PageList
    lows: mx.array
    """``[count]`` int32: the first position that each query sees, besides the first tokens that a
    window keeps."""
    offset: int
    tail_start: int
    """Position of the first token that is in no page."""

    @staticmethod
    def of(library: ModuleType, kind: Kind, row: Row, count: int) -> NativePrefill:
        """Describe a row whose length does not include the chunk yet."""
        positions = range(row.length, row.length + count)
        lows = mx.array([kind.low(position) for position in positions], mx.int32)
        return NativePrefill(library, kind, PageList.of([row]), lows, row.length, row.tail_start)

    def attend(
        self,
        queries: mx.array,
        layer: LayerStore,
        chunk: Chunk,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend a chunk, like `kvd.worker.attention.prefill.prefill_attention`."""
        found: mx.array = self.library.prefill_attention(
            queries,
            self.pages.array,
            chunk.keys,
            chunk.values,
            self.lows,
            *pools_of(layer, self.pages),
            scale,
            self.kind.keep,
            sinks,
            self.pages.count,
            self.offset,
            self.tail_start,
        )
        return found
