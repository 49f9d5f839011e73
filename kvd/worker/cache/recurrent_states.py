"""Recurrent states of running sequences: Mamba, gated delta nets, RWKV, short convolutions.

mlx-lm's `ArraysCache` as it is: one object per layer goes into every forward pass, and holds the
states of that pass's sequences. States are replaced and never written to, so a copy is a reference.
Sequences that share passes have their states in one *block*, row by row; only when others share
them are blocks built anew, and then the device is waited for. What stays is the sequences' own:
neither padding nor a larger array behind a slice outlives its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvd.worker.cache.layout import StatePart

State = list[list[mx.array | None]]
"""Of each part, its arrays; None before the first token."""

_GONE = object()
"""Stands in a block for a sequence that was removed: any name may be somebody's."""


@dataclass(eq=False)
class _Block:
    """The states of sequences that share passes, in order."""

    members: list[Any]
    state: State
    """``[members, ...]`` each."""


COPIES = 3
"""Of a sequence's states, alive in a pipelined loop: what the step in flight took, what it leaves,
and what the next one leaves, which is launched before the first is given back (measured)."""


class StateStore:
    """The states of all sequences, in all recurrent layers.

    A sequence is named by any hashable object.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self.parts = list(parts)
        self.caches = [ArraysCache(len(part.shapes)) for part in self.parts]
        """What the model sees, one a part."""
        self._block_of: dict[Any, _Block] = {}
        self._now = _Block([], [])
        """Whose pass is under way."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(part.nbytes for part in self.parts)

    @property
    def charged_row_bytes(self) -> int:
        """Bytes that one sequence's states take at the worst moment of a loop."""
        return COPIES * self.row_bytes

    @property
    def places(self) -> int:
        """Sequences that states are held of: those that were removed go with the next pass."""
        return sum(len(block.members) for block in self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """All states, for `mx.eval`."""
        return [array for block in self._blocks for array in _there(block.state)]

    @property
    def _blocks(self) -> list[_Block]:
        return list(dict.fromkeys(self._block_of.values()))

    def add(self, name: Any) -> None:
        """Start a sequence without any state."""
        self.restore(name, [[None] * len(part.shapes) for part in self.parts])

    def complete(self, name: Any) -> bool:
        """Return whether a sequence's state has its full shape, and so can be joined with others.

        Some models tell no state from one of zeros, and some keep the last few token ids.
        """
        block = self._block_of[name]
        return len(block.members) > 1 or all(
            array is not None and array.shape == shape
            for arrays, part in zip(block.state, self.parts, strict=True)
            for array, shape in zip(arrays, part.shapes, strict=True)
        )

    def state_of(self, name: Any) -> State:
        """Return a sequence's state, ``[1, ...]`` each."""
        return self._joined([name])

    def snapshot(self, name: Any) -> State:
        """Return a sequence's state for keeps, by reference where it stands alone; evaluated."""
        state = self.state_of(name)
        mx.eval(list(_there(state)))
        return state

    def restore(self, name: Any, state: State) -> None:
        """Start a sequence with a state that was frozen."""
        self._block_of[name] = _Block([name], [list(part) for part in state])

    def remove(self, name: Any) -> None:
        """Forget a sequence; its block keeps its place until the next pass."""
        members = self._block_of.pop(name).members
        members[members.index(name)] = _GONE

    def begin(self, names: list[Any], batch: int) -> None:
        """Give the caches the states of these sequences, then of ``batch`` minus as many more."""
        self._arrange(names)
        self._now = self._block_of[names[0]]
        more = batch - len(names)
        for part, cache in enumerate(self.caches):
            arrays = self._now.state[part]
            cache.cache = [self._padded(a, part, index, more) for index, a in enumerate(arrays)]

    def end(self) -> None:
        """Take the states that the pass left; evaluated, layer by layer, where it was padded."""
        rows = len(self._now.members)
        for part, cache in enumerate(self.caches):
            found: list[mx.array | None] = cache.cache
            self._now.state[part] = [_own(array, rows) for array in found]
            padded = any(array is not None and array.shape[0] > rows for array in found)
            found = cache.cache = [None] * len(found)  # else it would hold what is replaced later
            if padded:  # lazy, the padding of all layers would be there at once
                mx.eval([array for array in self._now.state[part] if array is not None])

    def drop_gone(self) -> None:
        """Give back the places of those that were removed; the device must be idle."""
        self._now = _Block([], [])  # the last pass's; it may hold somebody who is gone
        self._regroup([block for block in self._blocks if _GONE in block.members], [])

    def _arrange(self, names: list[Any]) -> None:
        """Let one block have these members, and none a place for somebody who is gone."""
        whole = self._block_of[names[0]].members == names
        mine = set() if whole else set(names)
        changing = [
            block
            for block in self._blocks
            if _GONE in block.members or not mine.isdisjoint(block.members)
        ]
        self._regroup(changing, [] if whole else names)

    def _regroup(self, changing: list[_Block], names: list[Any]) -> None:
        """Build a block of these members, and others of who is left in the changing ones."""
        mine = set(names)
        rest = [
            [member for member in block.members if member is not _GONE and member not in mine]
            for block in changing
        ]
        groups = [group for group in (names, *rest) if group]
        blocks = [_Block(list(group), self._joined(group)) for group in groups]
        if blocks:  # evaluated: in a step's flight these would be one copy more
            mx.eval([array for block in blocks for array in _there(block.state)])
        for block in blocks:
            self._block_of.update(dict.fromkeys(block.members, block))

    def _joined(self, names: list[Any]) -> State:
        return [
            [self._array(names, part, index) for index in range(len(one.shapes))]
            for part, one in enumerate(self.parts)
        ]

    def _array(self, names: list[Any], part: int, index: int) -> mx.array | None:
        pieces: list[mx.array] = []
        for block, some in itertools.groupby(names, self._block_of.__getitem__):
            places = [block.members.index(name) for name in some]
            array = block.state[part][index]
            if array is None:
                if len(names) == 1:
                    return None
                array = self._blank(part, index, len(places))
            elif places != list(range(len(block.members))):
                array = mx.take(array, mx.array(places), 0)
            pieces.append(array)
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _blank(self, part: int, index: int, rows: int) -> mx.array:
        one = self.parts[part]
        return mx.zeros((rows, *one.shapes[index][1:]), one.dtypes[index])

    def _padded(self, array: mx.array | None, part: int, index: int, more: int) -> mx.array | None:
        if not more:
            return array
        if array is None:
            return self._blank(part, index, 1 + more)
        return mx.concatenate([array, self._blank(part, index, more)])

    def clear(self) -> None:
        """Forget everything."""
        for cache in self.caches:
            cache.cache = [None] * len(cache.cache)
        self._block_of = {}
        self._now = _Block([], [])


def _there(state: State) -> Iterable[mx.array]:
    return (array for part in state for array in part if array is not None)


def _own(array: mx.array | None, rows: int) -> mx.array | None:
    """Return what a pass left of the first rows, without what it may be a slice of; lazy."""
    if array is None or array.shape[0] == rows:
        return array if array is None else mx.contiguous(array)
    return mx.take(array, mx.arange(rows), 0)
