"""What rows of a model cost: the worker's own arithmetic, for forecasts. Pure.

A worker fills in `Costs` when it has loaded, from the arrays that it has (`kvd.worker.serving.costs`);
the daemon fills in an estimate before that (`kvd.daemon.estimate`). Sums are what a worker asks of the
budget, so they count worst cases: what a row may come to hold until it ends.
"""

from __future__ import annotations

import msgspec

from protocol.pages import max_pages


class KVCost(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of one kind."""

    window: int | None = None
    keep: int = 0
    chunk: int | None = None
    """What they attend to; with neither window nor chunk, to everything."""
    layers: int
    page_bytes: tuple[int, ...]
    """Of one page in all of them, by level; the levels of rows that are not quantized yet first."""
    charges: tuple[int, ...]
    """The same with a page's share of the copy that growing a pool takes."""

    def pages(self, length: int, step: int) -> int:
        """Return the most pages that a row holds on its way to a length."""
        return max_pages(length, window=self.window, keep=self.keep, chunk=self.chunk, step=step)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one worker."""

    weights_bytes: int
    base_bytes: int
    """Weights, scratch, the interpreter, what the allocator keeps: for good."""
    unit_bytes: int
    """What rows are counted in: a page, charged."""
    row_bytes: int
    """Of every row, however short: its tail, its states, its first checkpoint."""
    first_units: int
    """What a worker that nobody asks anything holds beside its base."""
    step: int
    """Tokens that are prefilled at once."""
    levels: int = 1
    """Of the ladder."""
    dense_until: int = 0
    """Rows shorter than this are not quantized."""
    kinds: list[KVCost] = []
    own_token_bytes: int = 0
    """Of models whose caches are not ours: of a token in all layers."""

    def pages_bytes(self, length: int, level: int = 0) -> int:
        """Return the most bytes of pages that a row fills on its way to a length, as charged."""
        if self.own_token_bytes:  # its arrays grow in steps, and are copied when they do
            return 2 * self.own_token_bytes * (length + max(256, self.step))
        return sum(self._charged(kind, length, level) for kind in self.kinds)

    def _charged(self, kind: KVCost, length: int, level: int) -> int:
        above = len(kind.charges) - self.levels
        start = level + above if level else 0
        first = start or (1 if self.dense_until else 0)
        found = kind.pages(length, self.step) * kind.charges[first]
        if first > start:  # for a moment both: dense pages, and what they become
            dense = kind.pages(min(length, self.dense_until + self.step), self.step)
            found = max(found, dense * (kind.charges[0] + kind.charges[1]))
        return found

    def row_units(self, length: int, level: int = 0) -> int:
        """Return what a worker reserves for a row that ends at this length at the latest."""
        pages = -(-self.pages_bytes(length, level) // self.unit_bytes)
        return pages + -(-self.row_bytes // self.unit_bytes)

    def total_bytes(self, rows: int, length: int, level: int = 0, *, held_units: int = 0) -> int:
        """Return the grant that covers so many rows, beside what other rows hold."""
        units = held_units + rows * self.row_units(length, level)
        return self.base_bytes + max(self.first_units, units) * self.unit_bytes

    def max_rows(self, budget: int, length: int, level: int = 0, *, held_units: int = 0) -> int:
        """Return how many such rows a grant of so many bytes covers."""
        units = (budget - self.base_bytes) // self.unit_bytes - held_units
        return max(0, units // self.row_units(length, level))

    def token_bytes(self, level: int = 0) -> float:
        """Return what a token of a long row takes in the layers that see everything."""
        if self.own_token_bytes:
            return float(self.own_token_bytes)
        growing = [kind for kind in self.kinds if kind.window is None and kind.chunk is None]
        at = [len(kind.page_bytes) - self.levels + level for kind in growing]
        return sum(k.page_bytes[i] for k, i in zip(growing, at, strict=True)) / 64


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model that is not loaded."""

    costs: Costs
    schemes: list[str]
    """Of its ladder, from the top down."""
    context_length: int
