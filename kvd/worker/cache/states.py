"""Recurrent states of running sequences: Mamba, gated delta nets, RWKV, short convolutions.

mlx-lm's `ArraysCache` as it is: one object per layer goes into every forward pass, and holds the
states of that pass's sequences. States are replaced and never written to, so a copy is a reference.
The decode batch keeps its arrays between steps; only a change of its members costs a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvd.worker.cache.layout import StatePart

State = list[list[mx.array | None]]
"""Of each part, its arrays; None before the first token."""

_GONE = object()
"""Stands in the decode batch for a sequence that was removed: any name may be somebody's."""


class StateStore:
    """The states of all sequences, in all recurrent layers.

    A sequence is named by any hashable object.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self.parts = list(parts)
        self.caches = [ArraysCache(len(part.shapes)) for part in self.parts]
        """What the model sees, one a part."""
        self._held: dict[Any, State] = {}
        """States of sequences that are not in the decode batch."""
        self._members: list[Any] = []
        """Of the decode batch, whose arrays may have padding behind them."""
        self._batch: State = []
        self._padded = 0
        self._now: list[Any] = []
        """Whose pass is under way."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(part.nbytes for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All states, for `mx.eval`."""
        states = [*self._held.values(), self._batch]
        return [array for state in states for part in state for array in part if array is not None]

    def add(self, name: Any) -> None:
        """Start a sequence without any state."""
        self._held[name] = [[None] * len(part.shapes) for part in self.parts]

    def complete(self, name: Any) -> bool:
        """Return whether a sequence's state has its full shape, and so can be joined with others.

        Some models tell no state from one of zeros, and some keep the last few token ids.
        """
        held = self._held.get(name)
        return held is None or all(
            array is not None and array.shape == shape
            for arrays, part in zip(held, self.parts, strict=True)
            for array, shape in zip(arrays, part.shapes, strict=True)
        )

    def snapshot(self, name: Any) -> State:
        """Return a sequence's state, ``[1, ...]`` each."""
        self._scatter()
        return [list(part) for part in self._held[name]]

    def freeze(self, name: Any) -> State:
        """Return a sequence's state for keeps; evaluated.

        By reference, unless it is a part of a larger array, which it would keep alive.
        """
        state = [
            [None if array is None else mx.contiguous(array) for array in part]
            for part in self.snapshot(name)
        ]
        mx.eval(state)
        return state

    def thaw(self, name: Any, state: State) -> None:
        """Start a sequence with a state that was frozen."""
        self._held[name] = [list(part) for part in state]

    def remove(self, name: Any) -> None:
        """Forget a sequence; it may stand in the decode batch until that changes."""
        self._held.pop(name, None)
        self._members = [_GONE if member == name else member for member in self._members]

    def begin(self, names: list[Any], batch: int) -> None:
        """Give the caches the states of these sequences, then of ``batch`` minus as many more."""
        self._now = names
        if len(names) == batch == 1:  # a prefill, or a pass of one row: the batch stays as it is
            if names[0] in self._members:
                self._scatter()
            self._give(self._held[names[0]])
            return
        if names != self._members or batch != self._padded:
            self._scatter()
            self._batch = [
                [self._joined(names, batch, part, index) for index in range(len(one.shapes))]
                for part, one in enumerate(self.parts)
            ]
            for name in names:
                del self._held[name]
            self._members, self._padded = list(names), batch
        self._give(self._batch)

    def end(self) -> None:
        """Take the states that the pass left."""
        found = [list(cache.cache) for cache in self.caches]
        if len(self._now) == 1 and self._now[0] in self._held:
            self._held[self._now[0]] = found
        else:
            self._batch = found

    def _give(self, state: State) -> None:
        for cache, arrays in zip(self.caches, state, strict=True):
            cache.cache = list(arrays)

    def _joined(self, names: list[Any], batch: int, part: int, index: int) -> mx.array:
        shape, dtype = self.parts[part].shapes[index], self.parts[part].dtypes[index]
        blank = mx.zeros(shape, dtype)
        arrays = [self._held[name][part][index] for name in names] + [None] * (batch - len(names))
        return mx.concatenate([blank if array is None else array for array in arrays])

    def _scatter(self) -> None:
        """Give each member of the decode batch its own state back."""
        for position, name in enumerate(self._members):
            if name is not _GONE:
                self._held[name] = [
                    [None if array is None else array[position : position + 1] for array in part]
                    for part in self._batch
                ]
        self._members, self._batch, self._padded = [], [], 0

    def clear(self) -> None:
        """Forget everything."""
        self._held, self._members, self._batch, self._padded = {}, [], [], 0
