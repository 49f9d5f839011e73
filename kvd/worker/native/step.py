"""The backend that attends with the native library, in decode steps and in prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx

from kvd.worker.cache.backend import pools_of, rows_of
from kvd.worker.cache.padded_sizes import padded_length
from kvd.worker.cache.page_tables import PageList

if TYPE_CHECKING:
    from kvd.worker.cache.attention_kind import Kind
    from kvd.worker.cache.layer import Chunk, LayerStore
    from kvd.worker.cache.rows import Row
    from kvd.worker.cache.steps import DecodeStep, PrefillStep


@dataclass(frozen=True)
class Library:
    """Runs attention with kvd's own CPU operations, in all steps."""

    module: ModuleType

    def decode(
        self, _: Sequence[LayerStore], kind: Kind, rows: Sequence[Row], pages: PageList
    ) -> NativeStep:
        return NativeStep.of(self.module, kind, rows, pages)

    def prefill(self, kind: Kind, step: PrefillStep) -> NativePrefill:
        return NativePrefill.of(self.module, kind, step)

    def pack_tails(self, *_: Any) -> None:
        """Return None: plain operations are as fast."""

    def launched(self, _: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class NativeStep:
    """A decode step's arguments for the library: those that are the same in all layers."""

    library: ModuleType
    kind: Kind
    pages: PageList
    rows: mx.array
    """``[rows, 6]`` int32: the numbers of `rows_of`."""
    moves_tails: ClassVar[bool] = False

    @staticmethod
    def of(library: ModuleType, kind: Kind, rows: Sequence[Row], pages: PageList) -> NativeStep:
        return NativeStep(library, kind, pages, mx.array(rows_of(kind, rows, pages), mx.int32))

    def append(self, layer: LayerStore, _: DecodeStep, keys: mx.array, values: mx.array) -> None:
        layer.tail_keys, layer.tail_values = self.library.append(
            layer.tail_keys, layer.tail_values, keys, values, self.rows
        )

    def attend(
        self, queries: mx.array, layer: LayerStore, scale: float, sinks: mx.array | None
    ) -> mx.array:
        attend: Callable[..., mx.array] = self.library.decode_attention
        tails = layer.tail_keys, layer.tail_values
        pools = pools_of(layer, self.pages)
        keep = self.kind.keep
        return attend(queries, self.pages.array, *tails, self.rows, *pools, scale, keep, sinks)

    def padded(self) -> NativeStep:
        return replace(self, pages=self.pages.padded(padded_length(self.pages.count)))

    def shapes(self, _: DecodeStep) -> tuple[Any, ...]:
        return "native", self.pages.array.shape[0]

    def arrays(self, step: DecodeStep) -> list[mx.array]:
        return [step.offsets, self.rows, self.pages.array]

    def with_arrays(self, step: DecodeStep, given: Iterator[mx.array]) -> DecodeStep:
        offsets, rows, pages = (next(given) for _ in range(3))
        backend = replace(self, rows=rows, pages=self.pages.with_array(pages))
        return replace(step, backend=backend, shared={"offsets": offsets})


@dataclass(frozen=True)
class NativePrefill:
    """A prefill chunk's arguments for the library: those that are the same in all layers."""

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
    def of(library: ModuleType, kind: Kind, step: PrefillStep) -> NativePrefill:
        positions = range(step.offset, step.offset + step.count)
        lows = mx.array([kind.low(position) for position in positions], mx.int32)
        pages = step.page_list(kind)
        return NativePrefill(library, kind, pages, lows, step.offset, step.tail_start)

    def attend(
        self,
        queries: mx.array,
        layer: LayerStore,
        chunk: Chunk,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        attend: Callable[..., mx.array] = self.library.prefill_attention
        return attend(
            queries,
            self.pages.array,
            chunk.keys,
            chunk.values,
            self.lows,
            *pools_of(layer, self.pages, chunk.earlier),
            scale,
            self.kind.keep,
            sinks,
            self.pages.count,
            self.offset,
            self.tail_start,
        )
