"""Recurrent states of running sequences: Mamba, gated delta nets, RWKV, short convolutions.

Models get mlx-lm's `ArraysCache`, unchanged: one object per layer goes into every forward pass, and
holds the states of that pass's sequences. States are replaced and never written to, so a reference
serves as a copy. Sequences that share passes have their states in one *block*, row by row. When
different sequences share a pass than before, blocks are rebuilt, which waits for the device. After
a step only the sequences' own states stay alive: padding is dropped, and a state that is a slice of
a larger array is copied.
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
"""For each part, its arrays; None before the first token."""

_GONE = object()
"""Placeholder in a block for a sequence that was removed."""


@dataclass(eq=False)
class _Block:
    """The states of sequences that share passes."""

    members: list[Any]
    state: State
    """Each array is ``[members, ...]``."""


COPIES = 3
"""Copies of a sequence's states that a pipelined loop keeps alive (measured): the input and output
of the step in flight, and the output of the next step, which starts before the input is freed."""


class StateStore:
    """The states of all sequences in all recurrent layers. Any hashable object names a sequence."""

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self.parts = list(parts)
        self.caches = [ArraysCache(len(part.shapes)) for part in self.parts]
        self._block_of: dict[Any, _Block] = {}
        self._current = _Block([], [])

    @property
    def row_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def charged_row_bytes(self) -> int:
        """Most bytes that one sequence's states take in a pipelined loop."""
        return COPIES * self.row_bytes

    @property
    def places(self) -> int:
        """Number of sequences whose states exist. A removed one may count until the next pass."""
        return sum(len(block.members) for block in self._blocks)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for block in self._blocks for array in _present(block.state)]

    @property
    def _blocks(self) -> list[_Block]:
        return list(dict.fromkeys(self._block_of.values()))

    def add(self, name: Any) -> None:
        self.restore(name, self.empty())

    def empty(self) -> State:
        """Return the state before the first token."""
        return [[None] * len(part.shapes) for part in self.parts]

    def complete(self, name: Any) -> bool:
        """Return whether a sequence's state has its full shape, so that it can be batched."""
        # A missing state must not be replaced by zeros: some models treat the two differently, and
        # some states hold the last few token ids.
        block = self._block_of[name]
        return len(block.members) > 1 or all(
            array is not None and array.shape == shape
            for arrays, part in zip(block.state, self.parts, strict=True)
            for array, shape in zip(arrays, part.shapes, strict=True)
        )

    def state_of(self, name: Any) -> State:
        return self._joined([name])

    def snapshot(self, name: Any) -> State:
        """Return a sequence's state, evaluated; by reference if it is alone in its block."""
        state = self.state_of(name)
        mx.eval(list(_present(state)))
        return state

    def restore(self, name: Any, state: State) -> None:
        self._block_of[name] = _Block([name], [list(part) for part in state])

    def remove(self, name: Any) -> None:
        """Remove a sequence. Its place in the block is freed with the next pass."""
        members = self._block_of.pop(name).members
        members[members.index(name)] = _GONE

    def begin(self, names: list[Any], batch: int) -> None:
        """Put the states of these sequences into the caches, padded to ``batch`` sequences."""
        self._arrange(names)
        self._current = self._block_of[names[0]]
        more = batch - len(names)
        for part, cache in enumerate(self.caches):
            arrays = self._current.state[part]
            cache.cache = [self._padded(a, part, index, more) for index, a in enumerate(arrays)]

    def end(self) -> None:
        """Take over the states that the pass left. After a padded pass, evaluates them."""
        rows = len(self._current.members)
        for part, cache in enumerate(self.caches):
            found: list[mx.array | None] = cache.cache
            self._current.state[part] = [_own(array, rows) for array in found]
            padded = any(array is not None and array.shape[0] > rows for array in found)
            found = cache.cache = [None] * len(found)  # both would keep replaced states alive
            if padded:  # layer by layer: otherwise the padding of all layers would exist at once
                mx.eval([array for array in self._current.state[part] if array is not None])

    def drop_gone(self) -> None:
        """Free the states of sequences that were removed. The device must be idle."""
        self._current = _Block([], [])  # the last pass may have included a removed sequence
        self._regroup([block for block in self._blocks if _GONE in block.members], [])

    def _arrange(self, names: list[Any]) -> None:
        """Ensure that one block has exactly these members, and that no block has a removed one."""
        whole = self._block_of[names[0]].members == names
        mine = set() if whole else set(names)
        changing = [
            block
            for block in self._blocks
            if _GONE in block.members or not mine.isdisjoint(block.members)
        ]
        self._regroup(changing, [] if whole else names)

    def _regroup(self, changing: list[_Block], names: list[Any]) -> None:
        """Build one block of these members, and blocks of the other members of ``changing``."""
        mine = set(names)
        rest = [
            [member for member in block.members if member is not _GONE and member not in mine]
            for block in changing
        ]
        groups = [group for group in (names, *rest) if group]
        blocks = [_Block(list(group), self._joined(group)) for group in groups]
        if blocks:  # evaluated: as part of the step in flight they would be one more copy
            mx.eval([array for block in blocks for array in _present(block.state)])
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
        for cache in self.caches:
            cache.cache = [None] * len(cache.cache)
        self._block_of = {}
        self._current = _Block([], [])


def _present(state: State) -> Iterable[mx.array]:
    return (array for part in state for array in part if array is not None)


def _own(array: mx.array | None, rows: int) -> mx.array | None:
    """Return a copy of a state's first rows that keeps no larger array alive; lazy."""
    if array is None or array.shape[0] == rows:
        return array if array is None else mx.contiguous(array)
    return mx.take(array, mx.arange(rows), 0)
