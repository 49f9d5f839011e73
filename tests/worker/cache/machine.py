"""Random operations on a model's whole cache, each followed by a comparison with dense rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.layout import StatePart
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot
from kvd.worker.cache.step_down import StepDown
from kvd.worker.cache.store import KVStore
from tests.worker.attention.dense import dense_attention
from tests.worker.cache.forward import SCALE, Output, attend, recur
from tests.worker.cache.model import NOWHERE, DenseModel, DenseStore, agree
from tests.worker.cache.worlds import World

FAILURES = st.sampled_from([None, None, 0, 0, 1])
"""Index of the write or copy that fails in each piece of a step-down; None: none fails."""
MOST_ROWS = 5
MOST_SNAPSHOTS = 4
MOST_TOKENS = 900
HOUSEKEEPING = ("flush", "compact", "shrink", "limit", "read")


@dataclass
class Down:
    """A step-down that is under way in one store."""

    work: StepDown
    dense: DenseStore
    level: int


def _packed(rows: mx.array, counts: list[int], padding: int) -> mx.array:
    """Return the first tokens of ``[rows, heads, tokens, dim]`` as ``[batch, heads, 1, dim]``."""
    parts = [row[:, :count] for row, count in zip(rows, counts, strict=True)]
    extra = mx.full((rows.shape[1], padding, rows.shape[3]), NOWHERE)
    return mx.concatenate([*parts, extra], axis=1).swapaxes(0, 1)[:, :, None]


def _spread(output: mx.array, counts: list[int], count: int) -> mx.array:
    """Return a packed output as ``[rows, heads, count, dim]``, with zeros after each row."""
    parts = mx.split(output[:, :, 0].swapaxes(0, 1), list(accumulate(counts)), axis=1)
    return mx.stack(
        [mx.pad(one, [(0, 0), (0, count - one.shape[1]), (0, 0)]) for one in parts[:-1]]
    )


class Machine(RuleBasedStateMachine):
    """A cache, and the dense model with which it is compared."""

    world: World
    seen: Counter[str]

    @initialize(tokens=st.integers(0, 1 << 16))
    def start(self, tokens: int) -> None:
        self.rng = np.random.default_rng(tokens)
        self.cache = self.world.cache()
        self.twin = DenseModel(self.cache)
        self.downs: list[Down] = []
        self.news = 0
        """Operations since the last of `HOUSEKEEPING`: the next of those would often do nothing."""
        self.where = self._where()

    def _where(self) -> list[tuple[int, int] | None]:
        """Return the store and layer of each part, or None for a state."""
        kinds, taken = self.cache.layout.kinds, Counter()
        where: list[tuple[int, int] | None] = []
        for parts in self.world.parts:
            for part in parts:
                if isinstance(part, StatePart):
                    where.append(None)
                    continue
                where.append((kinds.index(part.kind), taken[part.kind]))
                taken[part.kind] += 1
        return where

    # Choices. Each draws few numbers, because an example's draws must fit hypothesis's buffer.

    @property
    def sequences(self) -> list[SequenceRow]:
        return self.cache.sequences

    def _some(self, choice: int) -> list[SequenceRow]:
        """Return some sequences, at least one, in any order."""
        order = np.random.default_rng(choice).permutation(len(self.sequences))
        return [self.sequences[index] for index in order[: 1 + choice % len(order)]]

    def _one(self, choice: int) -> SequenceRow:
        return self.sequences[choice % len(self.sequences)]

    # Forward passes.

    def _views(self, sequences: list[SequenceRow]) -> list[Any]:
        flat: list[Any] = []
        for parts, view in zip(self.world.parts, self.cache.views(sequences), strict=True):
            flat += list(view.caches) if len(parts) > 1 else [view]
        return flat

    def _pass(
        self,
        sequences: list[SequenceRow],
        count: int,
        batch: int,
        *,
        with_attention: bool,
        counts: list[int] | None = None,
        padding: int = 0,
    ) -> None:
        """Run the model over ``count`` new tokens of each sequence, and update the dense model.

        ``counts``: tokens of each sequence in a packed pass, which ``padding`` tokens follow.
        """
        is_packed = counts is not None
        counts = counts or [count] * len(sequences)
        prefill = bool(self.cache._prefilling)
        inputs = self.rng.integers(-8, 9, (batch, count, 4)).astype(np.float32)
        outputs: list[Output] = []
        news: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for where, view in zip(self.where, self._views(sequences), strict=True):
            if where is None:
                recur(view, mx.array(inputs))
                continue
            store, layer = where
            g = self.twin.stores[store].geometries[layer]
            k, v = (self._normal(batch, g.kv_heads, count, dim) for dim in (g.k_dim, g.v_dim))
            news.setdefault(store, []).append((k, v))
            queries = mx.array(self._normal(batch, 2 * g.kv_heads, count, g.k_dim))
            given = [queries, mx.array(k), mx.array(v)]
            if is_packed:
                given = [_packed(one, counts, padding) for one in given]
            found = view.update_and_fetch(*given[1:])
            if with_attention:
                output = attend(view, given[0], found)
                if is_packed:
                    output = _spread(output, counts, count)
                outputs.append(Output(store, layer, queries, output))
        self.cache.end_pass()
        mx.eval([one.output for one in outputs])
        if prefill:
            # A chunk sees its own tokens before any of them is quantized.
            self._check_outputs(sequences, outputs, news, counts)
        for store, layers in news.items():
            for index, sequence in enumerate(sequences):
                new = [
                    (k[index, :, : counts[index]], v[index, :, : counts[index]]) for k, v in layers
                ]
                self.twin.stores[store].append(sequence.rows[store], new, chunk=prefill)
        if not prefill:
            self._check_outputs(sequences, outputs, None, counts)
        own = [tokens[:mine] for tokens, mine in zip(inputs, counts, strict=False)]
        self.twin.step(sequences, own)

    def _normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def _check_outputs(
        self,
        sequences: list[SequenceRow],
        outputs: list[Output],
        news: dict[int, list[tuple[np.ndarray, np.ndarray]]] | None,
        counts: list[int],
    ) -> None:
        """Compare with dense attention over the dense rows' tokens and then those of ``news``."""
        for one in outputs:
            store = self.twin.stores[one.store]
            for index, sequence in enumerate(sequences):
                sides = store.dense(sequence.rows[one.store], one.layer)
                if news is not None:
                    new = news[one.store][one.layer]
                    sides = tuple(
                        mx.concatenate([side, mx.array(more[index, :, : counts[index]])], axis=1)
                        for side, more in zip(sides, new, strict=True)
                    )
                keys, values = sides if sides[1].shape[2] else (sides[0], sides[0])
                mine = one.queries[index, :, : counts[index]]
                want = dense_attention(mine, keys, values, SCALE, kind=store.kind)
                agree(one.output[index, :, : counts[index]], np.array(want), 1e-4)
                self.seen["attention"] += 1

    def _drain(self) -> None:
        mx.eval(self.cache.arrays())

    def _flush(self) -> None:
        self._drain()
        self.cache.flush()
        self.twin.flush()

    # Operations.

    @precondition(lambda self: len(self.sequences) < MOST_ROWS)
    @rule(length=st.sampled_from([0, 1, 63, 64, 65, 127, 128, 190, 300, 520]))
    def insert(self, length: int) -> None:
        sequence = self.cache.new_row()
        self.twin.add(sequence)
        for start in range(0, length, 256):
            self._prefill(sequence, min(256, length - start), with_attention=False)
        self._checked("insert")

    def _prefill(self, sequence: SequenceRow, count: int, *, with_attention: bool) -> None:
        self._drain()
        self.cache.begin_prefill(sequence, count)
        self._pass([sequence], count, 1, with_attention=with_attention)
        self.cache.finish_prefill()
        self.twin.flush()

    @precondition(lambda self: self.sequences)
    @rule(
        choice=st.integers(0, 99),
        count=st.sampled_from([1, 2, 40, 64, 100, 128, 256]),
        with_attention=st.booleans(),
    )
    def prefill(self, choice: int, count: int, with_attention: bool) -> None:
        sequence = self._one(choice)
        if sequence.length + count <= MOST_TOKENS:
            self._prefill(sequence, count, with_attention=with_attention)
        self._checked("prefill")

    @precondition(lambda self: self.cache.can_pack and len(self.sequences) > 1)
    @rule(
        choice=st.integers(0, 99),
        count=st.sampled_from([1, 40, 64, 100]),
        less=st.sampled_from([0, 0, 1, 30]),
        padding=st.integers(0, 2),
    )
    def prefill_packed(self, choice: int, count: int, less: int, padding: int) -> None:
        """Prefill some rows in one pass, every second of them with fewer tokens."""
        fitting = [one for one in self._some(choice) if one.length + count <= MOST_TOKENS]
        if not fitting:
            return
        counts = [max(1, count - less * (index % 2)) for index in range(len(fitting))]
        self._drain()
        self.cache.begin_packed(fitting, counts, sum(counts) + padding)
        self._pass(
            fitting, count, len(fitting), with_attention=True, counts=counts, padding=padding
        )
        self.cache.finish_prefill()
        self.twin.flush()
        self._checked("prefill_packed")

    @precondition(lambda self: self.sequences)
    @rule(
        choice=st.integers(0, 99),
        count=st.sampled_from([1, 1, 1, 2, 3, 12]),
        padding=st.integers(0, 2),
        with_attention=st.booleans(),
    )
    def decode(self, choice: int, count: int, padding: int, with_attention: bool) -> None:
        """Decode some sequences together, in any order."""
        self._decodes(self._some(choice), count, padding, with_attention=with_attention)

    @precondition(lambda self: self.sequences)
    @rule(count=st.sampled_from([1, 3, 12]), with_attention=st.booleans())
    def decode_all(self, count: int, with_attention: bool) -> None:
        self._decodes(self.sequences, count, 0, with_attention=with_attention)

    def _decodes(
        self, chosen: list[SequenceRow], count: int, padding: int, *, with_attention: bool
    ) -> None:
        chosen = [one for one in chosen if one.length < MOST_TOKENS] or chosen[:1]
        for number in range(count):
            if self.cache.needs_flush(chosen):
                self._flush()
            self._decode(chosen, padding, with_attention=with_attention and number == count - 1)
            mx.async_eval(self.cache.arrays())
        self._checked("decode")

    def _decode(self, chosen: list[SequenceRow], padding: int, *, with_attention: bool) -> None:
        if self.world.rectangles:
            padding = 0  # padding is for fixed shapes, and rectangles have none
        for together in [chosen] if self.world.batched else [[one] for one in chosen]:
            batch = len(together) + padding
            self.cache.begin_decode(together, batch)
            self._pass(together, 1, batch, with_attention=with_attention)

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 99), count=st.sampled_from([0, 1, 5, 63, 64, 65, 130, 200]))
    def trim(self, choice: int, count: int) -> None:
        """Remove tokens in all stores. States cannot remove tokens."""
        sequence = self._one(choice)
        self._drain()
        if self._can_trim(sequence, count):
            for store, row in zip(self.twin.stores, sequence.rows, strict=True):
                store.store.trim(row, count)
                store.trim(row, count)
            sequence.length -= count
            self.seen["trimmed"] += 1
        self._checked("trim")

    def _can_trim(self, sequence: SequenceRow, count: int) -> bool:
        can = True
        for store, row in zip(self.twin.stores, sequence.rows, strict=True):
            one = store.store.can_trim(row, count)
            length = row.length - count
            if one:
                assert length >= 0
                assert store.can_trim(row, count)
            else:
                # The store may refuse if only anchored pages are left, and at the start of a
                # chunk, which sees no earlier token.
                none_left = length < 64 * max(1, row.anchored)
                none_seen = store.kind.low(length) == length
                assert none_left or none_seen or not store.can_trim(row, count)
                with pytest.raises(ValueError, match="cannot be taken back"):
                    store.store.trim(row, count)
            can &= one
        return can

    @precondition(lambda self: self.sequences and len(self.cache.snapshots.all) < MOST_SNAPSHOTS)
    @rule(choice=st.integers(0, 99))
    def snapshot(self, choice: int) -> None:
        """Take a snapshot. Nothing that the sequence does later changes it."""
        sequence = self._one(choice)
        self._drain()
        self.twin.snapshot(sequence, self.cache.snapshots.take(sequence))
        self._checked("snapshot")

    @precondition(lambda self: self.cache.snapshots.all and len(self.sequences) < MOST_ROWS)
    @rule(choice=st.integers(0, 99))
    def restore(self, choice: int) -> None:
        """Restore a snapshot, which stays and shares its pages."""
        snapshot = self.cache.snapshots.all[choice % len(self.cache.snapshots.all)]
        self._drain()
        self.twin.restore(snapshot, self.cache.restore(snapshot))
        self._checked("restore")

    @precondition(lambda self: self.news > 1 and len(self.cache.snapshots.all) > 1)
    @rule(choice=st.integers(0, 99))
    def drop(self, choice: int) -> None:
        """Drop a snapshot. A step may be in flight, because no step reads snapshots."""
        snapshot = self.cache.snapshots.all[choice % len(self.cache.snapshots.all)]
        freed = self.cache.snapshots.freed_bytes([snapshot])
        before = self.cache.usage.used_bytes + self.cache.snapshots.nbytes
        charge = self.cache.snapshot_charge
        assert charge <= sum(map(self.cache.snapshots.charge_of, self.cache.snapshots.all))
        self.cache.snapshots.drop(snapshot)
        assert before - self.cache.usage.used_bytes - self.cache.snapshots.nbytes == freed
        assert charge - self.cache.snapshots.charge_of(snapshot) <= self.cache.snapshot_charge
        assert self.cache.snapshot_charge <= charge - snapshot.nbytes
        self.twin.drop(snapshot)
        self._checked("drop")

    @precondition(lambda self: self.sequences)
    @rule(choice=st.integers(0, 99), clean=st.booleans())
    def free(self, choice: int, clean: bool) -> None:
        """Free a sequence, perhaps with NaN in its tail."""
        sequence = self._one(choice)
        self._drain()
        if not clean:
            for store, row in zip(self.cache.stores, sequence.rows, strict=True):
                for layer in store.layers:
                    layer.tail_keys[row.slot] = mx.nan
                    layer.tail_values[row.slot] = mx.nan
        self.cache.free(sequence, clean=clean)
        self.twin.free(sequence)
        self._checked("free")

    @precondition(lambda self: self.news > 1)
    @rule()
    def flush(self) -> None:
        self._flush()
        self._checked("flush")

    @precondition(lambda self: self.news > 1)
    @rule(pages=st.sampled_from([0, 3, 40]))
    def compact(self, pages: int) -> None:
        self._flush()
        before = self.cache.nbytes
        most = [[one.capacity for one in store.pages.allocators] for store in self.cache.stores]
        freed = self.cache.compact(pages)
        assert freed == before - self.cache.nbytes
        for store, capacities in zip(self.cache.stores, most, strict=True):
            for allocator, capacity in zip(store.pages.allocators, capacities, strict=True):
                kept = _room(store, allocator.level, pages)
                assert allocator.capacity == min(capacity, max(allocator.used, kept))
                for layer in store.layers:
                    sides = layer.pools[allocator.level].capacities
                    assert sides == (allocator.capacity, allocator.capacity)
        self._checked("compact")

    @precondition(lambda self: self.news > 1 and len(self.sequences) <= 2)
    @rule(pages=st.sampled_from([0, 3]))
    def shrink(self, pages: int) -> None:
        """Free all sequences, and all memory except that of snapshots."""
        self._drain()
        for sequence in list(self.sequences):
            self.cache.free(sequence)
            self.twin.free(sequence)
        self.cache.shrink(pages)
        self.twin.left = 0
        wanted = self.cache.snapshots.nbytes
        for store in self.cache.stores:
            for allocator in store.pages.allocators:
                room = 0 if allocator.level or store.kind.bounded else pages
                assert allocator.free <= room
                wanted += allocator.capacity * store.pages.page_bytes(allocator.level)
        assert self.cache.nbytes == wanted
        assert self.cache.nbytes >= self.cache.snapshots.held_bytes(self.cache.snapshots.all)
        self._checked("shrink")

    @precondition(lambda self: self.news > 1)
    @rule(units=st.sampled_from([None, 0, 2, 100]))
    def limit(self, units: int | None) -> None:
        """Limit how far pools may grow ahead of need."""
        if units is None:
            self.cache.limit_bytes = None
        else:
            self.cache.limit_bytes = self.cache.charged_bytes + units * self.cache.costs.unit_bytes
        self._checked("limit")

    @precondition(
        lambda self: self.sequences and self.cache.usage.pages_used and len(self.downs) < 4
    )
    @rule(choice=st.integers(0, 99), level=st.integers(1, 2), fails_at=FAILURES)
    def step_down(self, choice: int, level: int, fails_at: int | None) -> None:
        """Start to step some sequences down; `slice` does the rest."""
        self._drain()
        chosen: list[SequenceRow | SequenceSnapshot] = [*self._some(choice)]
        if choice % 3 == 0:  # as if a preempted sequence were stepped down
            chosen += self.cache.snapshots.all[:1]
        for index, dense in enumerate(self.twin.stores):
            if level in dense.store.pages.levels:
                rows = [one.rows[index] for one in chosen]
                self.downs.append(Down(StepDown(dense.store, rows, level), dense, level))
                for row in rows:
                    mine = dense.rows[row]
                    mine.level = max(mine.level, level)
        for down in self.downs:
            for _ in range(4):
                self._piece(down, fails_at)
        self._checked("step_down")

    @precondition(lambda self: self.downs)
    @rule(pieces=st.integers(1, 12), fails_at=FAILURES)
    def slice(self, pieces: int, fails_at: int | None) -> None:
        """Do a few pieces of the oldest step-downs. Errors may interrupt them."""
        self._drain()
        for _ in range(pieces):
            if not self.downs:
                break
            down = self.downs[0]
            self._piece(down, fails_at)
            if down.work.over:
                self.downs.pop(0)
        self._checked("slice")

    def _piece(self, down: Down, fails_at: int | None) -> None:
        done = None
        with failing(fails_at):
            try:
                done = down.work.advance(0.0, lambda: 1.0)
            except MemoryError:
                self.seen["interrupted"] += 1
        changed = down.dense.follow_step_down(down.level)
        assert done is None or done == changed
        self.seen["converted pages"] += changed

    @precondition(lambda self: self.downs)
    @rule()
    def finish_step_downs(self) -> None:
        self._flush()
        for down in self.downs:
            while not down.work.over:
                self._piece(down, None)
        for down in self.downs:
            for row in down.work._rows:
                assert not row.alive or all(page.level >= down.level for page in row.pages)
        self.downs = []
        self._checked("finish_step_downs")

    @precondition(lambda self: self.news > 1 and self.sequences)
    @rule(choice=st.integers(0, 99))
    def read(self, choice: int) -> None:
        """Compare what the stores and the states return for one sequence."""
        sequence = self._one(choice)
        self._drain()
        for store, row in zip(self.twin.stores, sequence.rows, strict=True):
            store.read(row)
        if self.cache.states.parts:
            self.twin.check_state(sequence)
        self._checked("read")

    def _checked(self, name: str) -> None:
        """Compare everything, and count the operation as executed."""
        self.twin.check()
        self.seen[name] += 1
        self.seen["steps"] += 1
        self.news = 0 if name in HOUSEKEEPING else self.news + 1


def _room(store: KVStore, level: int, pages: int) -> int:
    """Return for how many pages compacting keeps room on a level.

    Only level 0 keeps room: for ``pages`` pages, less the bytes that lower levels use.
    """
    if level or store.kind.bounded:
        return 0
    lower = sum(one.used * store.pages.charge(one.level) for one in store.pages.allocators[1:])
    return max(0, pages - -(-lower // store.pages.charge()))


@contextmanager
def failing(at: int | None) -> Iterator[None]:
    """Make the ``at``-th write or copy of a step-down fail."""
    calls = iter(range(1 << 30))

    def guarded(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if next(calls) == at:
                raise MemoryError("injected")
            function(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStore, "move", guarded(LayerStore.move))
        patch.setattr(PagePool, "resize", guarded(PagePool.resize))
        yield
