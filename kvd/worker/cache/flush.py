"""The flush: pages that are due are written into the pools.

The device must be idle, unless kernels write everything (`LayerStore.is_flushed_by_kernel`). Then
the writes are launched behind the steps in flight, and the host may do other work before it waits
for them (`Flusher.wait`).

It writes the pages that chunks of prompts have filled, and the next page of every row whose tail
has the tokens for it. Several layers are written together: each evaluation waits for the device
once, and for a small model on an accelerator that wait is most of a flush. Pages that are written
together exist twice during the write, so their bytes are limited. Kernels write the next layers
while the host prepares those behind them, so at most two groups of layers exist twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvd.worker.cache.dense_start import DenseStart
from kvd.worker.cache.layer import FlushWrites, LayerStore, PackTails, Placement
from kvd.worker.cache.page_store import PageStore
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.together import limit_bytes


@dataclass
class _NewPages:
    """Pages of one level that a flush writes."""

    level: int
    filled: list[Row]
    """The row of each page that a chunk has filled."""
    ahead: list[Row]
    """Rows whose next page is written ahead."""
    pages: list[PageId] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:
        return [index for index, row in enumerate(self.filled) if row.alive]

    @property
    def count(self) -> int:
        return len(self.kept) + len(self.ahead)

    def placement(self) -> Placement:
        slots = [page.slot for page in self.pages]
        return Placement(self.level, slots, self.kept, [row.slot for row in self.ahead])

    def assign(self) -> None:
        kept = self.kept
        for index, page in zip(kept, self.pages, strict=False):
            self.filled[index].pages.append(page)
        for row, page in zip(self.ahead, self.pages[len(kept) :], strict=True):
            row.written_ahead = [page]


class Flusher:
    """Writes the pages of one store's rows."""

    def __init__(
        self,
        layers: list[LayerStore],
        pages: PageStore,
        dense_start: DenseStart,
        pack_tails: PackTails,
    ) -> None:
        self._layers = layers
        self._pages = pages
        self._pack_tails = pack_tails
        self._dense_start = dense_start
        self._launched: list[mx.array] = []
        """What kernels write, until `wait`."""

    def write(self, rows: list[Row], filled: list[Row], prefilled: Collection[Row] = ()) -> None:
        """Write the pages that are due; `wait` must follow. ``rows``: all running rows.

        The device must be idle, unless kernels write everything (see the module).

        ``filled`` has the row of each page that a chunk has filled, in the order of the layers'
        pending pages. Rows in ``prefilled`` get new tails and no page written ahead.
        """
        outgrown = [row for row in rows if self._dense_start.outgrown(row)]
        for row in outgrown:
            self._pages.release_written_ahead(row)  # written again, on the row's new level
        due = [row for row in rows if row.can_write_ahead and row not in prefilled]
        new = [self._new_pages(level, filled, due) for level in self._pages.levels]
        new = [pages for pages in new if pages.count]
        self._pages.make_ready({pages.level: pages.count for pages in new})
        for pages in new:
            pages.pages = self._pages.take(pages.level, pages.count)
        placements = [pages.placement() for pages in new]
        layers, pack_tails = self._layers, self._pack_tails
        if all(layer.is_flushed_by_kernel for layer in layers):
            writes = (layer.gather(placements, pack_tails) for layer in layers)
            self._launched = _write(layers, writes)
        else:
            mx.eval(
                _write(layers, (layer.gather_pages(placements, pack_tails) for layer in layers))
            )
            if any(layer.new_tails for layer in layers):
                self._launched = _write(layers, (layer.gather_tails() for layer in layers))
        for pages in new:
            pages.assign()
        if outgrown:
            self.wait()  # leaving the dense start reads pools
            self._dense_start.leave(outgrown)

    def wait(self) -> None:
        """Wait until the device has written everything."""
        mx.eval(self.take_launched())

    def take_launched(self) -> list[mx.array]:
        """Return what kernels may still be writing; `wait` no longer waits for it."""
        launched, self._launched = self._launched, []
        return launched

    def _new_pages(self, level: int, filled: list[Row], due: list[Row]) -> _NewPages:
        start = self._dense_start
        ahead = [row for row in due if max(row.level, start.level(row.length)) == level]
        return _NewPages(level, [row for row in filled if row.level == level], ahead)


def _write(layers: Sequence[LayerStore], writes: Iterable[FlushWrites]) -> list[mx.array]:
    """Write; return what kernels may still be writing."""
    together: list[tuple[LayerStore, FlushWrites]] = []
    by_kernel = all(layer.is_flushed_by_kernel for layer in layers)
    nbytes, limit = 0, limit_bytes() // (2 if by_kernel else 1)
    launched: list[mx.array] = []
    for pair in zip(layers, writes, strict=True):
        together.append(pair)
        nbytes += pair[1].created_bytes
        del pair  # frees what was written before more is gathered
        if nbytes >= limit:
            mx.eval(launched)
            launched = _write_together(together)
            nbytes = 0
    return launched + _write_together(together)


def _write_together(together: list[tuple[LayerStore, FlushWrites]]) -> list[mx.array]:
    """Write, or launch the kernels that write; return the arrays whose evaluation is under way."""
    launched: list[mx.array] = []
    if all(layer.writes_by_kernel(writes) for layer, writes in together):
        launched = [array for layer, writes in together for array in layer.put(writes)]
        mx.async_eval(launched)  # type: ignore[no-untyped-call]
    else:
        # Evaluated first, so that nothing except the write references a pool: only then is the
        # write in place.
        mx.eval([writes.arrays() for _, writes in together])
        mx.eval([layer.put(writes) for layer, writes in together])
    together.clear()
    return launched
