"""What rows of a model cost in bytes, for workers and forecasts.

A loaded worker reports `Costs` of its arrays; before that the daemon estimates them. Totals are
worst cases: what a row may hold at any time until it ends. Workers request these totals from the
budget.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from protocol.pages import PAGE_TOKENS, max_pages

RESERVED_TOKENS = 512
"""Tokens of a completion that are reserved at admission, and up to which a reservation is extended.

It is extended when less than half is left. The other half, 256 tokens, takes a second or more to
decode, which is enough for the daemon to free memory; and most answers fit the first 512.
"""


class KVCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of all layers of one kind."""

    window: int | None = None
    """Number of tokens that the layers attend to: the first `keep`, and the newest; absent: all."""
    keep: int = 0
    """First tokens of a row that the window includes."""
    chunk: int | None = None
    """Tokens of a chunk, if the layers attend within chunks only."""
    layers: int
    page_bytes: tuple[int, ...]
    """Bytes of one page in all these layers, by precision level.

    With a dense start there is one more entry in front, for rows that are not quantized yet.
    """
    charges: tuple[int, ...]
    """`page_bytes` plus a page's share of the copy that is made when a pool grows."""

    def pages(self, length: int, step: int) -> int:
        """Return the maximum pages that a row holds while it grows to this length."""
        return max_pages(length, window=self.window, keep=self.keep, chunk=self.chunk, step=step)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one model in one worker."""

    weights_bytes: int
    base_bytes: int
    """Bytes held permanently: weights, scratch, interpreter and the allocator's cache."""
    unit_bytes: int
    """Bytes of the unit in which rows are counted: a page's charge, if rows grow without bound."""
    row_bytes: int
    """Bytes that a row of any length takes: its tail, its states and its first checkpoint."""
    first_units: int
    """Units that a worker without requests holds in addition to `base_bytes`."""
    step: int
    """Most tokens of one prompt that a step prefills."""
    levels: int = 1
    """Number of precision levels."""
    dense_until: int = 0
    """Tokens below which rows are not quantized."""
    kinds: list[KVCost] = []
    """Costs by kind of layer."""
    own_token_bytes: int = 0
    """Bytes of a token in all layers, for models that keep mlx-lm's own caches."""

    def divided(self, parts: int) -> Costs:
        """Return the costs on one of ``parts`` devices whose ranks have equal parts of a model."""
        if parts == 1:
            return self
        kinds = [
            replace(
                kind,
                page_bytes=tuple(it // parts for it in kind.page_bytes),
                charges=tuple(it // parts for it in kind.charges),
            )
            for kind in self.kinds
        ]
        return replace(
            self,
            weights_bytes=self.weights_bytes // parts,
            base_bytes=self.base_bytes // parts,
            unit_bytes=self.unit_bytes // parts,
            row_bytes=self.row_bytes // parts,
            own_token_bytes=self.own_token_bytes // parts,
            kinds=kinds,
        )

    def pages_bytes(self, length: int, level: int = 0) -> int:
        """Return the maximum bytes charged for a row's pages while it grows to this length."""
        if self.own_token_bytes:  # arrays grow in steps, and each growth copies them
            return 2 * self.own_token_bytes * (length + max(256, self.step))
        return sum(self._charged(kind, length, level) for kind in self.kinds)

    def _charged(self, kind: KVCost, length: int, level: int) -> int:
        extra = len(kind.charges) - self.levels
        start = level + extra if level else 0
        first = start or (1 if self.dense_until else 0)
        charged = kind.pages(length, self.step) * kind.charges[first]
        if first > start:  # dense and quantized pages exist together for a while
            dense = kind.pages(min(length, self.dense_until + self.step), self.step)
            charged = max(charged, dense * (kind.charges[0] + kind.charges[1]))
        return charged

    def row_units(self, length: int, level: int = 0) -> int:
        """Return the units that a worker reserves for a row of at most this length."""
        pages = -(-self.pages_bytes(length, level) // self.unit_bytes)
        return pages + -(-self.row_bytes // self.unit_bytes)

    def total_bytes(self, rows: int, length: int, level: int = 0, *, held_units: int = 0) -> int:
        """Return the grant that covers ``rows`` rows in addition to ``held_units``."""
        units = held_units + rows * self.row_units(length, level)
        return self.base_bytes + max(self.first_units, units) * self.unit_bytes

    def max_rows(self, budget: int, length: int, level: int = 0, *, held_units: int = 0) -> int:
        """Return how many rows a grant of ``budget`` bytes covers in addition to ``held_units``."""
        units = (budget - self.base_bytes) // self.unit_bytes - held_units
        return max(0, units // self.row_units(length, level))

    def token_bytes(self, level: int = 0) -> float:
        """Return the bytes by which each token makes a long row grow.

        Layers with a window or chunks are left out, because their part of a row is bounded.
        """
        if self.own_token_bytes:
            return float(self.own_token_bytes)
        growing = [kind for kind in self.kinds if kind.window is None and kind.chunk is None]
        at = [len(kind.page_bytes) - self.levels + level for kind in growing]
        page_bytes = sum(kind.page_bytes[i] for kind, i in zip(growing, at, strict=True))
        return page_bytes / PAGE_TOKENS


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a model that is not loaded, estimated from its files."""

    costs: Costs
    schemes: list[str]
    """KV schemes by precision level."""
    context_length: int
