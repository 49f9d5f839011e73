"""Thousands of random operations on drop-in caches, compared with dense rows.

After every operation, lengths, contents, levels, the references to each row and page, and the bytes
of each cache and store agree with `tests.worker.mlx_lm_drop_in.dense`. Contents agree bit for bit.
In CI the operations are the same every time. ``KVD_DROPIN_STEPS=50000`` runs more of them, and
different ones each time.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.worker.cache import page_store
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, Scheme
from kvd.worker.cache.step_down import StepDown
from kvd.worker.mlx_lm_drop_in import shared_store
from kvd.worker.mlx_lm_drop_in.caches import (
    DropInKVCache,
    DropInRotatingKVCache,
)
from kvd.worker.mlx_lm_drop_in.shared_store import LayerRows, SharedRow, SharedStore
from tests.worker.mlx_lm_drop_in.dense import (
    TAIL_BYTES,
    DenseSequence,
    Sides,
    Tag,
    Twin,
    check_shared,
    page_bytes,
)

pytestmark = pytest.mark.mlx

CI_STEPS = 6_000
STEPS = int(os.environ.get("KVD_DROPIN_STEPS", CI_STEPS))
STEPS_AN_EXAMPLE = 50
MOST_CACHES, MOST_ROWS, MOST_TOKENS = 6, 4, 500
CHOICE = st.integers(0, 999)
COUNTS = (1, 2, 30, 63, 64, 65, 120, 126, 190)


class Caches(RuleBasedStateMachine):
    """Caches of one layer, most of them in its home store, and their expected content."""

    schemes: tuple[Scheme, ...] = (Scheme(16, 16),)
    kind = FULL
    start = 0
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.type = DropInKVCache if self.kind == FULL else DropInRotatingKVCache
        self.home = self._store(home=True)
        self.stores = [self.home]
        self.twins: list[Twin] = []

    def _store(self, *, home: bool = False) -> SharedStore:
        return SharedStore(self.schemes, self.kind, quantized_start=self.start, home=home)

    def _add(self, twin: Twin) -> None:
        if len(self.twins) < MOST_CACHES and len(twin.rows) <= MOST_ROWS:
            self.twins.append(twin)

    def _one(self, choice: int) -> Twin:
        return self.twins[choice % len(self.twins)]

    # New caches and tokens.

    @rule(foreign=st.sampled_from([False, False, True]))
    def new(self, foreign: bool) -> None:
        place = self._store() if foreign else self.home
        self._add(Twin(self.type.on(place), [DenseSequence(self.schemes, self.start)]))
        self._checked("new")

    @precondition(lambda self: self.twins)
    @rule(choice=CHOICE, tokens=CHOICE, shares=st.booleans(), drops=st.booleans())
    def prefill(self, choice: int, tokens: int, shares: bool, drops: bool) -> None:
        """Prefill a chunk. Sequences of a batch get chunks of different lengths, or none."""
        twin = self._one(choice)
        rng = np.random.default_rng(tokens)
        count = len(twin.rows)
        counts = [COUNTS[index] for index in rng.integers(0, len(COUNTS), count)]
        if isinstance(twin.cache.offset, mx.array):
            counts = [one if rng.random() < 0.8 else 0 for one in counts]
            counts[0] = counts[0] or 1
        else:  # a single sequence has no padding
            counts = [max(counts)] * count
        if max(row.length for row in twin.rows) + max(counts) <= MOST_TOKENS:
            left = twin.cache.empty() and tokens % 2 == 0
            twin.update(counts, self.rng, left=left, meanwhile=self._meanwhile(twin, shares, drops))
        self._checked("prefill")

    @precondition(lambda self: self.twins)
    @rule(
        choice=CHOICE,
        steps=st.sampled_from([1, 1, 2, 3, 9]),
        shares=st.booleans(),
        drops=st.booleans(),
    )
    def decode(self, choice: int, steps: int, shares: bool, drops: bool) -> None:
        twin = self._one(choice)
        for step in range(steps):
            last = step == steps - 1
            meanwhile = self._meanwhile(twin, shares, drops) if last else None
            twin.update([1] * len(twin.rows), self.rng, meanwhile=meanwhile)
        self._checked("decode")

    def _meanwhile(self, busy: Twin, shares: bool, drops: bool):
        """Return what happens in a pass before a second layer reads its keys; None if none does."""
        if not shares:
            return None

        def drop() -> None:
            others = [twin for twin in self.twins if twin is not busy]
            if drops and len(others) > 2:
                # The longest rows are dropped, so that most of the pools is free.
                others.sort(key=lambda twin: -sum(row.length for row in twin.rows))
                self.twins = [twin for twin in self.twins if twin not in others[:3]]
                self.seen["dropped in a pass"] += 1
            self.seen["shared keys"] += 1

        return drop

    # Caches made from caches.

    @precondition(lambda self: self.twins)
    @rule(choice=CHOICE, size=st.integers(1, 3), drop=st.booleans())
    def merge(self, choice: int, size: int, drop: bool) -> None:
        parts = [self._one(choice // 7**index) for index in range(size)]
        merged = self.type.merge([part.cache for part in parts])
        rows = [row for part in parts for row in self._moved(part, merged.shared)]
        for one, mine in zip(merged.rows, [r for p in parts for r in p.cache.rows], strict=True):
            if mine in self._rows_of(merged.shared):
                assert one is mine, "a row of the same store was copied instead of referenced"
        if drop:
            self.twins = [twin for twin in self.twins if twin not in parts]
        self._add(Twin(merged, rows))
        del merged, parts, rows
        self._checked("merge")

    @precondition(lambda self: len(self.twins) > 1)
    @rule(choice=CHOICE)
    def extend(self, choice: int) -> None:
        twin, other = self._one(choice), self._one(choice // 7)
        if len(twin.rows) + len(other.rows) <= MOST_ROWS:
            before = twin.cache.shared
            twin.cache.extend(other.cache)
            here = twin.cache.shared
            rows = [row.copy() for row in twin.rows] if here is before else self._retagged(twin)
            twin.rows = rows + self._moved(other, here, before if other is twin else None)
        self._checked("extend")

    def _moved(
        self, part: Twin, to: SharedStore, came_from: SharedStore | None = None
    ) -> list[DenseSequence]:
        at_home = (came_from or part.cache.shared) is to
        return [row.copy() for row in part.rows] if at_home else self._retagged(part)

    @staticmethod
    def _retagged(part: Twin) -> list[DenseSequence]:
        new: dict[Tag, Tag] = {}
        return [row.retagged(new) for row in part.rows]

    @precondition(lambda self: self.twins)
    @rule(choice=CHOICE)
    def extract(self, choice: int) -> None:
        twin = self._one(choice)
        index = choice % len(twin.rows)
        single = twin.cache.extract(index)
        assert isinstance(single.offset, int)
        assert single.rows == [twin.cache.rows[index]]
        self._add(twin.like(single, [twin.rows[index]]))
        del single
        self._checked("extract")

    @precondition(lambda self: self.twins)
    @rule(choice=CHOICE, as_array=st.booleans())
    def filter(self, choice: int, as_array: bool) -> None:
        """Keep some sequences, in any order, perhaps twice."""
        twin = self._one(choice)
        rng = np.random.default_rng(choice)
        keep = rng.integers(0, len(twin.rows), rng.integers(1, len(twin.rows) + 1)).tolist()
        before = list(twin.cache.rows)
        twin.cache.filter(mx.array(keep) if as_array else keep)
        assert twin.cache.rows == [before[index] for index in keep]
        twin.rows = [twin.rows[index].copy() for index in keep]
        del before
        self._checked("filter")

    @precondition(lambda self: self.twins)
    @rule(choice=CHOICE, deep=st.booleans())
    def copy(self, choice: int, deep: bool) -> None:
        twin = self._one(choice)
        copied = copy.deepcopy([twin.cache])[0] if deep else copy.copy(twin.cache)
        assert copied.rows == twin.cache.rows
        self._add(twin.like(copied))
        del copied
        self._checked("copy")

    @precondition(lambda self: self.twins)
    @rule(choice=CHOICE)
    def through_a_state(self, choice: int) -> None:
        twin = self._one(choice)
        restored = type(twin.cache).from_state(twin.cache.state)
        self._add(Twin(restored, self._retagged(twin)))
        del restored
        self._checked("through_a_state")

    # Caches are dropped, and tokens removed.

    @precondition(lambda self: len(self.twins) > 1)
    @rule(choice=CHOICE, cycle=st.booleans())
    def delete(self, choice: int, cycle: bool) -> None:
        """Drop a cache; with ``cycle``, only the garbage collector frees it."""
        twin = self._one(choice)
        self.twins.remove(twin)
        if cycle:
            twin.cache.itself = twin.cache
        del twin
        if cycle:
            gc.collect()
        self._checked("delete")

    @precondition(lambda self: self.twins)
    @rule(choice=CHOICE, count=st.sampled_from([0, 1, 5, 63, 64, 65, 150, 900]))
    def trim(self, choice: int, count: int) -> None:
        twin = self._one(choice)
        most = max(twin.cache.lengths)
        sure = twin.cache.is_trimmable()
        try:
            assert twin.cache.trim(count) == min(count, most)
        except ValueError:
            assert not sure
            self.seen["refused to trim"] += 1
        else:
            twin.trim(count)
            self.seen["trimmed"] += bool(count and most)
        self._checked("trim")

    # Housekeeping of the home store.

    def _alive(self) -> list[SharedStore]:
        return [one for one in self._places() if one.nbytes]

    @precondition(lambda self: self._alive())
    @rule(choice=CHOICE)
    def flush(self, choice: int) -> None:
        place = self._alive()[choice % len(self._alive())]
        with place.at_work():
            place.flush()
        self._checked("flush")

    @precondition(lambda self: self._alive())
    @rule(choice=CHOICE, pages=st.sampled_from([0, 3]))
    def compact(self, choice: int, pages: int) -> None:
        place = self._alive()[choice % len(self._alive())]
        with place.at_work():
            place.flush()
            rows = place.rows
            before = rows.nbytes
            assert rows.pages.compact(pages) == before - rows.nbytes >= 0
            for one in rows.pages.allocators:
                assert one.used <= one.capacity <= max(one.used, 0 if one.level else pages)
        self._checked("compact")

    @precondition(lambda self: len(self.schemes) > 1 and self._alive())
    @rule(choice=CHOICE)
    def lower(self, choice: int) -> None:
        """Step some sequences of a cache down, and with them the pages that others share."""
        twin = self._one(choice)
        level = 1 + choice % (len(self.schemes) - 1)
        place = twin.cache.shared
        chosen = {one.row for one in twin.cache.rows if one.row is not None}
        if choice % 3 == 0:
            chosen = set(list(chosen)[:1])
        if chosen:
            with place.at_work():
                place.flush()
                for one in self.twins:
                    one.adopt()
                due = {page for row in chosen for page in row.pages if page.level < level}
                self._lower_twins(place, due, chosen, level)
                work = StepDown(place.rows, chosen, level)
                while not work.over:
                    work.advance(0.0, lambda: 1.0)
            self.seen["converted pages"] += len(due)
        self._checked("lower")

    def _lower_twins(
        self, place: SharedStore, due: set[PageId], chosen: set[Row], level: int
    ) -> None:
        for twin in self.twins:
            if twin.cache.shared is not place:
                continue
            for one, row, pages in twin.paired():
                for index, page in pages.items():
                    if page in due:
                        row.lower(index, level)
                if one in chosen:
                    row.level = max(row.level, level)

    # After every operation.

    def _places(self) -> list[SharedStore]:
        found = {id(twin.cache.shared): twin.cache.shared for twin in self.twins}
        return list(found.values())

    def _rows_of(self, place: SharedStore) -> list[SharedRow]:
        return [one for twin in self.twins if twin.cache.shared is place for one in twin.cache.rows]

    def _checked(self, name: str) -> None:
        for twin in self.twins:
            twin.check_lengths()
        for place in self._places():
            self._check_store(place, [one for one in self.twins if one.cache.shared is place])
        for twin in self.twins:
            assert twin.cache.nbytes == twin.wanted_bytes()
        if self.home not in self._places():
            assert self.home.nbytes == 0, "memory is left although there is no cache"
        self.seen[name] += 1
        self.seen["steps"] += 1

    def _check_store(self, place: SharedStore, twins: list[Twin]) -> None:
        check_shared(place, [twin.cache.rows for twin in twins])
        holds = Counter(one for twin in twins for one in twin.cache.rows)
        assert all(one.holders == count for one, count in holds.items())
        rows = {one.row for one in holds if one.row is not None}
        if not rows:
            assert place.nbytes == 0
            return
        held = Counter(page for row in rows for page in row.held)
        store = place.rows
        for allocator in store.pages.allocators:
            mine = {page: count for page, count in held.items() if page.level == allocator.level}
            assert {page: allocator.references.get(page.slot, 0) for page in mine} == mine
            assert allocator.used == len(mine) <= allocator.capacity
        pools = sum(
            one.capacity * page_bytes(self.schemes[one.level]) for one in store.pages.allocators
        )
        assert place.nbytes == pools + store.tails.count * TAIL_BYTES
        arrays = [array for pool in store.layers[0].pools for array in pool.arrays()]
        tails = [store.layers[0].tail_keys, store.layers[0].tail_values]
        assert place.nbytes == sum(array.nbytes for array in (*arrays, *tails))
        self._check_contents(store, twins, held)

    def _check_contents(self, store: LayerRows, twins: list[Twin], held: Counter[PageId]) -> None:
        """Compare each page and tail with every sequence that has it.

        Assert that copied sequences share pages, and no others do.
        """
        layer = store.layers[0]
        pages: dict[PageId, Sides] = {}
        for level, pool in enumerate(layer.pools):
            mine = [page for page in held if page.level == level]
            if mine:
                sides = map(np.array, pool.read(mx.array([page.slot for page in mine])))
                pages |= dict(zip(mine, zip(*sides, strict=True), strict=True))
        tails = np.array(layer.tail_keys), np.array(layer.tail_values)
        names: dict[Tag, PageId] = {}
        for one, row, numbers in (found for twin in twins for found in twin.paired()):
            for index, page in numbers.items():
                row.agrees(index * PAGE_TOKENS, pages[page])
                if not self.start:
                    assert names.setdefault(row.tags[index], page) == page, "a page is copied"
            first, slot = one.tail_start, one.slot
            row.agrees(first, [side[slot, :, : row.length - first] for side in tails])
        assert len(set(names.values())) == len(names), "two pages have become one"

    def teardown(self) -> None:
        places = [self.home, *self._places()]
        self.twins.clear()
        gc.collect()
        for place in places:
            check_shared(place, [])
            assert place.nbytes == 0, "memory is left although there is no cache"


class Windows(Caches):
    kind = Kind(window=150, keep=4)


class Quantized(Caches):
    schemes = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))


class QuantizedLate(Caches):
    # Two bits, so that a row that is quantized too early is detected.
    schemes = (Scheme(16, 16), Scheme(2, 2))
    # The length after a prompt of 190 tokens and one decoded token. No page is due there, so only
    # the end of the dense start requires a flush.
    start = 191


class QuantizedLateWindows(QuantizedLate):
    kind = Kind(window=130, keep=10)


MACHINES = (Caches, Windows, Quantized, QuantizedLate, QuantizedLateWindows)


@pytest.fixture
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pools grow by single pages, and shrink as soon as more than half of them is free."""
    for module in (shared_store, page_store):
        monkeypatch.setattr(module, "SLAB_PAGES", 0)


@pytest.fixture
def _quick_collector():
    """Exclude all existing objects from garbage collection, which the tests trigger often."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("_small_slabs", "_quick_collector")
@pytest.mark.parametrize("machine", MACHINES)
def test_random_operations(machine: type[Caches]) -> None:
    seen: Counter[str] = Counter()
    counted = type("Machine", (machine,), {"seen": seen})
    wanted = STEPS // len(MACHINES)
    plan = settings(
        max_examples=3,
        stateful_step_count=STEPS_AN_EXAMPLE,
        database=None,
        deadline=None,
        # Shrinking a failure of a machine this slow takes longer than reading it.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    # In rounds, because some examples stop early: hypothesis limits the draws of an example.
    for number in itertools.count(0 if STEPS == CI_STEPS else random.randrange(1 << 32)):
        run_state_machine_as_test(seed(number)(counted), settings=plan)
        if seen["steps"] >= wanted:
            break
    rules = [*RULES, *(["lower", "converted pages"] if len(machine.schemes) > 1 else [])]
    rules += ["refused to trim"] if machine.kind.bounded else []
    for what in rules:
        assert seen[what] or STEPS < CI_STEPS, what


RULES = (
    "new",
    "prefill",
    "decode",
    "shared keys",
    "dropped in a pass",
    "merge",
    "extend",
    "extract",
    "filter",
    "copy",
    "through_a_state",
    "delete",
    "trim",
    "trimmed",
    "flush",
    "compact",
)
