"""A thousand random operations on caches against lists of dense rows, with every hold counted."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.worker.cache.dropin import (
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
)
from kvd.worker.cache.kinds import FULL, Kind
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.shared import SharedStore
from tests.dropin.dense import Sequence, Twin

pytestmark = pytest.mark.mlx

# Shrinking a failure of a machine this slow takes longer than reading it.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
COUNTS = st.one_of(st.integers(1, 5), st.integers(1, 200))


class Caches(RuleBasedStateMachine):
    ladder = (Scheme(16, 16),)
    kind = FULL
    quantized_start = 0
    tolerance = 2e-5

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.type = BatchQuantizedKVCache if self.kind == FULL else BatchQuantizedRotatingKVCache
        self.home = SharedStore(
            self.ladder, self.kind, quantized_start=self.quantized_start, home=True
        )
        self.stores = {self.home}
        self.twins: list[Twin] = []

    def add(self, twin: Twin) -> None:
        if len(self.twins) < 8 and len(twin.rows) < 6:
            self.twins.append(twin)
            self.stores.add(twin.cache.shared)

    def one(self, data: st.DataObject) -> Twin:
        return self.twins[data.draw(st.integers(0, len(self.twins) - 1))]

    @rule(foreign=st.sampled_from([False, False, False, True]))
    def new(self, foreign: bool) -> None:
        store = self.home
        if foreign:
            store = SharedStore(self.ladder, self.kind, quantized_start=self.quantized_start)
        self.add(Twin(self.type.on(store), [Sequence()], self.tolerance))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        twin = self.one(data)
        if twin.cache.lengths and max(twin.cache.lengths) > 800:
            return
        batched = isinstance(twin.cache.offset, mx.array)
        counts = data.draw(st.lists(COUNTS, min_size=len(twin.rows), max_size=len(twin.rows)))
        if not batched:  # a sequence alone has no padding
            counts = [max(counts)] * len(counts)
        twin.update(counts, self.rng, left=twin.cache.empty() and data.draw(st.booleans()))

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), steps=st.integers(1, 30))
    def decode(self, data: st.DataObject, steps: int) -> None:
        twin = self.one(data)
        for _ in range(steps):
            twin.update([1] * len(twin.rows), self.rng)

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), size=st.integers(1, 3), drop=st.booleans())
    def merge(self, data: st.DataObject, size: int, drop: bool) -> None:
        parts = [self.one(data) for _ in range(size)]
        merged = parts[0].cache.merge([part.cache for part in parts])
        rows = [row for part in parts for row in part.rows]
        if drop:
            self.twins = [twin for twin in self.twins if twin not in parts]
        self.add(parts[0].like(merged, rows))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def extract(self, data: st.DataObject) -> None:
        twin = self.one(data)
        index = data.draw(st.integers(0, len(twin.rows) - 1))
        single = twin.cache.extract(index)
        assert isinstance(single.offset, int)
        self.add(twin.like(single, [twin.rows[index]]))

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), as_array=st.booleans())
    def filter(self, data: st.DataObject, as_array: bool) -> None:
        twin = self.one(data)
        keep = data.draw(
            st.lists(st.integers(0, len(twin.rows) - 1), min_size=1, max_size=len(twin.rows))
        )
        twin.cache.filter(mx.array(keep) if as_array else keep)
        twin.rows = [copy.deepcopy(twin.rows[index]) for index in keep]

    @precondition(lambda self: len(self.twins) > 1)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        twin, other = self.one(data), self.one(data)
        if twin is other or len(twin.rows) + len(other.rows) > 6:
            return
        twin.cache.extend(other.cache)
        twin.rows += [copy.deepcopy(row) for row in other.rows]
        self.stores.add(twin.cache.shared)

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), deep=st.booleans())
    def copy(self, data: st.DataObject, deep: bool) -> None:
        twin = self.one(data)
        copied = copy.deepcopy([twin.cache])[0] if deep else copy.copy(twin.cache)
        self.add(twin.like(copied))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.twins.remove(self.one(data))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def delete_within_a_cycle(self, data: st.DataObject) -> None:
        twin = self.one(data)
        self.twins.remove(twin)
        twin.cache.itself = twin.cache  # freed by the collector, whenever that runs

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), count=st.integers(0, 150))
    def trim(self, data: st.DataObject, count: int) -> None:
        twin = self.one(data)
        before = max(twin.cache.lengths)
        if twin.cache.is_trimmable():
            assert twin.trim(count) == min(count, before)
            return
        try:
            twin.cache.trim(count)
        except ValueError:
            return
        for row in twin.rows:
            row.trim(count)

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def through_a_state(self, data: st.DataObject) -> None:
        twin = self.one(data)
        self.add(twin.like(type(twin.cache).from_state(twin.cache.state)))

    @invariant()
    def all_is_there_and_every_hold_counted(self) -> None:
        gc.collect()
        for twin in self.twins:
            twin.check()
        for store in self.stores:
            store.check([twin.cache.rows for twin in self.twins if twin.cache.shared is store])

    def teardown(self) -> None:
        self.twins.clear()
        gc.collect()
        for store in self.stores:
            store.check([])
            assert store.nbytes == 0, "memory stays although nobody holds a cache"


class Windows(Caches):
    kind = Kind(window=150, keep=4)


class Quantized(Caches):
    ladder = (Scheme(8, 8),)
    tolerance = 2e-2


class QuantizedLate(Caches):
    ladder = (Scheme(16, 16), Scheme(8, 8))
    quantized_start = 200
    tolerance = 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Caches, Windows, Quantized, QuantizedLate])
def test_random_operations(machine: type[Caches]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=4, stateful_step_count=40, phases=PHASES)
    )
