"""Recurrent states by name. A name is any hashable object; equal names mean one sequence."""

from __future__ import annotations

from collections.abc import Hashable

import mlx.core as mx
import pytest

from kvd.worker.cache.layout import StatePart
from kvd.worker.cache.recurrent_states import StateStore

pytestmark = pytest.mark.mlx


def step(states: StateStore, names: list[Hashable], values: list[float], batch: int = 0) -> None:
    """Run a pass that adds a value to each sequence's state."""
    batch = batch or len(names)
    states.begin(names, batch)
    (cache,) = states.caches
    before = mx.zeros((batch, 2)) if cache[0] is None else cache[0]
    cache[0] = before + mx.array([*values, *[9.0] * (batch - len(values))])[:, None]
    states.end()


def total(states: StateStore, name: Hashable) -> float:
    ((array,),) = states.state_of(name)
    assert array is not None
    assert array.shape == (1, 2)
    return float(array[0, 0].item())


def states_of(*names: Hashable) -> StateStore:
    states = StateStore([StatePart(((1, 2),), (mx.float32,))])
    for name in names:
        states.add(name)
    return states


def named(number: int) -> tuple[str, int]:
    return ("row", number)  # equal, but never the same object


def test_a_removed_sequence_does_not_come_back() -> None:
    states = states_of(*map(named, range(3)))
    step(states, [named(0), named(1), named(2)], [1.0, 2.0, 3.0], batch=4)
    states.remove(named(1))
    step(states, [named(2), named(0)], [10.0, 20.0], batch=4)

    assert (total(states, named(0)), total(states, named(2))) == (21.0, 13.0)
    assert states.nbytes == 2 * states.row_bytes


def test_none_is_a_valid_name() -> None:
    states = states_of(None, 0, "")
    step(states, [None, 0, ""], [1.0, 2.0, 3.0])
    states.remove(0)
    step(states, [None], [1.0])  # a pass of one sequence out of the batch, as in prefill

    assert (total(states, None), total(states, "")) == (2.0, 3.0)


def test_a_snapshot_does_not_keep_the_arrays_of_its_batch() -> None:
    part = StatePart(((1, 8192),), (mx.float32,))
    states = StateStore([part])
    for name in range(64):
        states.add(name)
    states.begin(list(range(64)), 64)
    states.caches[0][0] = mx.ones((64, 8192))
    states.end()
    mx.eval(states.arrays())
    snapshot = states.snapshot(7)
    states.clear()
    states.caches[0].cache = [None]
    mx.clear_cache()
    before = mx.get_active_memory()
    del snapshot

    assert 0 < before - mx.get_active_memory() < 2 * part.nbytes


def test_restored_sequences_are_independent() -> None:
    states = states_of("one", "other")
    step(states, ["one", "other"], [1.0, 2.0])
    states.restore("twin", states.snapshot("other"))
    step(states, ["twin", "other", "one"], [10.0, 20.0, 30.0], batch=5)

    assert [total(states, name) for name in ("one", "other", "twin")] == [31.0, 22.0, 12.0]


def test_padding_is_not_kept() -> None:
    states = states_of(*range(3))
    step(states, [0, 1], [1.0, 2.0], batch=16)
    step(states, [2], [4.0], batch=16)
    step(states, [0, 1], [1.0, 2.0], batch=16)
    mx.eval(states.arrays())

    assert states.nbytes == 3 * states.row_bytes
    assert [total(states, name) for name in range(3)] == [2.0, 4.0, 4.0]


def test_any_groups_of_sequences_may_share_passes() -> None:
    states = states_of(*range(6))
    wanted = [0.0] * 6
    for group in ([0, 1, 2], [3, 4], [5], [0, 1, 2], [3, 4], [4, 3], [2, 5, 0], [1], [0, 2]):
        step(states, list(group), [1.0 + name for name in group], batch=len(group) + 1)
        for name in group:
            wanted[name] += 1.0 + name
        assert states.places == 6

    assert [total(states, name) for name in range(6)] == wanted


def test_a_removed_sequence_loses_its_place_with_the_next_pass() -> None:
    states = states_of(*range(8))
    step(states, list(range(7)), [1.0] * 7)
    for name in range(1, 7):
        states.remove(name)
    assert (states.places, states.nbytes) == (8, 7 * states.row_bytes)
    step(states, [7], [1.0])

    assert (states.places, states.nbytes) == (2, 2 * states.row_bytes)
    assert total(states, 0) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 3, 12])
def test_a_pipelined_loop_stays_within_the_charge_of_states(padding: int) -> None:
    """Sequences join and leave, and batches may be padded. Afterwards only own states are left."""
    part = StatePart(((1, 1 << 16), (1, 3, 1 << 14)), (mx.float32, mx.float32))
    states = StateStore([part] * 12)
    mx.clear_cache()
    mx.reset_peak_memory()
    start = mx.get_active_memory()

    def run(names: list[int]) -> list[mx.array]:
        batch = len(names) + padding
        states.begin(names, batch)
        outputs = []
        for cache in states.caches:
            total, last = cache.cache
            x = outputs[-1] if outputs else mx.ones((batch, 1))
            total = x if total is None else total * 0.5 + x
            before = mx.zeros((batch, 3, 1 << 14)) if last is None else last
            # Like a convolution's state in a model: the newest tokens of a longer array.
            last = mx.concatenate([before, mx.ones((batch, 4, 1 << 14))], axis=1)[:, -3:]
            cache.cache = [mx.broadcast_to(total, (batch, 1 << 16)) + 0, last]
            outputs.append(cache.cache[0].mean(axis=1, keepdims=True))
        states.end()
        return outputs

    flight: list[mx.array] = []
    most = 0
    changes = {0: range(6), 5: range(16), 9: range(2, 16), 12: [15, 2, 7], 15: range(3)}
    names: list[int] = []
    for number in range(20):
        wanted = list(changes.get(number, names))
        for name in set(names) - set(wanted):
            states.remove(name)
        for name in sorted(set(wanted) - set(names)):
            states.add(name)
        names, most = wanted, max(most, states.places)
        outputs = run(names)
        mx.async_eval(outputs, states.arrays())
        mx.eval(flight)
        flight = outputs
    mx.eval(flight, states.arrays())
    peak = mx.get_peak_memory() - start
    mx.clear_cache()
    # Temporaries of two layers in a step: padded arrays, and the longer arrays that are cut.
    inside = 2 * (most + padding) * 3 * part.nbytes

    assert mx.get_active_memory() - start <= states.nbytes + (1 << 16)
    assert most == 16
    assert peak <= most * states.charged_row_bytes + inside
