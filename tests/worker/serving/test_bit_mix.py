"""Bits by layer: the knapsack against an exhaustive search, and losses between measured widths."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.serving import bit_mix
from kvd.worker.serving.bit_mix import MEASURED, WIDTHS, Side, choose, complete, predicted

losses = st.fixed_dictionaries({width: st.floats(0, 1, allow_nan=False) for width in WIDTHS})
sides = st.lists(
    st.builds(Side, st.sampled_from([64, 128, 192, 512]), losses), min_size=1, max_size=4
)


def size_of(some: list[Side], bits: tuple[int, ...] | list[int]) -> int:
    return sum(side.elements * width for side, width in zip(some, bits, strict=True))


@given(sides, st.sampled_from([3, 4, 6]), st.data())
def test_no_other_choice_of_the_size_loses_less(some: list[Side], uniform: int, data) -> None:
    limit = size_of(some, [uniform] * len(some))
    ceilings = data.draw(st.lists(st.sampled_from(WIDTHS), min_size=len(some), max_size=len(some)))
    allowed = [[width for width in WIDTHS if width <= ceiling] for ceiling in ceilings]
    found = choose(some, limit, allowed)

    assert size_of(some, found) <= limit
    assert all(width in own for width, own in zip(found, allowed, strict=True))
    fitting = (bits for bits in itertools.product(*allowed) if size_of(some, bits) <= limit)
    assert predicted(some, found) == pytest.approx(min(predicted(some, one) for one in fitting))


def test_sizes_beyond_the_knapsack_are_rounded_up_and_still_fit() -> None:
    falling = {width: 4.0**-width for width in WIDTHS}
    some = [Side(elements, falling) for elements in (1_000_003, 999_983, 7)]
    limit = size_of(some, (4, 4, 4)) + 5
    found = choose(some, limit)
    assert size_of(some, found) <= limit
    assert limit // bit_mix._MAX_UNITS > 1


def test_the_smallest_widths_fit_their_own_size_beyond_the_knapsack() -> None:
    """Units of the knapsack are larger than the values of a model with one value per key."""
    some = [Side(elements, {width: 4.0**-width for width in WIDTHS}) for elements in (577, 1)] * 61
    limit = size_of(some, [2] * len(some))
    assert limit > bit_mix._MAX_UNITS
    assert choose(some, limit) == [2] * len(some)


def test_a_size_below_the_smallest_widths_is_refused() -> None:
    side = Side(64, dict.fromkeys(WIDTHS, 0.0))
    with pytest.raises(ValueError, match="do not fit"):
        choose([side, side], 64 * 3)


def test_losses_between_and_outside_measured_widths_fall_exponentially() -> None:
    found = complete({bits: 4.0**-bits for bits in MEASURED})
    assert list(found) == list(WIDTHS)
    for bits, loss in found.items():
        assert math.isclose(loss, 4.0**-bits, rel_tol=1e-9)


@given(st.fixed_dictionaries({bits: st.floats(0, 10) for bits in MEASURED}))
def test_losses_never_grow_with_the_bits(measured: dict[int, float]) -> None:
    found = list(complete(measured).values())
    assert all(math.isfinite(loss) for loss in found)
    assert all(lower <= loss * (1 + 1e-9) for loss, lower in itertools.pairwise(found))
