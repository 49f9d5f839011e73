"""Recurrent states by name: any hashable object, equal ones being the same."""

from __future__ import annotations

from collections.abc import Hashable

import mlx.core as mx
import pytest

from kvd.worker.cache.layout import StatePart
from kvd.worker.cache.states import StateStore

pytestmark = pytest.mark.mlx


def step(states: StateStore, names: list[Hashable], values: list[float], batch: int = 0) -> None:
    """A pass that adds to each sequence's sum."""
    batch = batch or len(names)
    states.begin(names, batch)
    (cache,) = states.caches
    before = mx.zeros((batch, 2)) if cache[0] is None else cache[0]
    cache[0] = before + mx.array([*values, *[9.0] * (batch - len(values))])[:, None]
    states.end()


def total(states: StateStore, name: Hashable) -> float:
    ((array,),) = states.snapshot(name)
    assert array is not None
    assert array.shape == (1, 2)
    return float(array[0, 0].item())


def states_of(*names: Hashable) -> StateStore:
    states = StateStore([StatePart(((1, 2),), (mx.float32,))])
    for name in names:
        states.add(name)
    return states


def named(number: int) -> tuple[str, int]:
    return ("row", number)  # equal, and never the same object


def test_a_removed_sequence_does_not_come_back() -> None:
    states = states_of(*map(named, range(3)))
    step(states, [named(0), named(1), named(2)], [1.0, 2.0, 3.0], batch=4)
    states.remove(named(1))
    step(states, [named(2), named(0)], [10.0, 20.0], batch=4)

    assert (total(states, named(0)), total(states, named(2))) == (21.0, 13.0)
    assert states.nbytes == 2 * states.row_bytes


def test_none_is_a_name_as_good_as_any() -> None:
    states = states_of(None, 0, "")
    step(states, [None, 0, ""], [1.0, 2.0, 3.0])
    states.remove(0)
    step(states, [None], [1.0])  # a prefill of one that stood in the batch

    assert (total(states, None), total(states, "")) == (2.0, 3.0)


def test_a_frozen_state_keeps_no_batch_alive() -> None:
    part = StatePart(((1, 8192),), (mx.float32,))
    states = StateStore([part])
    for name in range(64):
        states.add(name)
    states.begin(list(range(64)), 64)
    states.caches[0][0] = mx.ones((64, 8192))
    states.end()
    mx.eval(states.arrays())
    frozen = states.freeze(7)
    states.clear()
    states.caches[0].cache = [None]
    mx.clear_cache()
    before = mx.get_active_memory()
    del frozen

    assert 0 < before - mx.get_active_memory() < 2 * part.nbytes


def test_twins_go_apart() -> None:
    states = states_of("one", "other")
    step(states, ["one", "other"], [1.0, 2.0])
    states.thaw("twin", states.freeze("other"))
    step(states, ["twin", "other", "one"], [10.0, 20.0, 30.0], batch=5)

    assert [total(states, name) for name in ("one", "other", "twin")] == [31.0, 22.0, 12.0]
