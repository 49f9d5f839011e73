"""The model of steps with grammars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.grammar_model import PIECES, Times, speed, step_of

MS = st.floats(0.05, 8.0)


def test_a_slow_device_hides_masks() -> None:
    assert speed(Times(device=8.0, masks=1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("device", [0.5, 1.0, 2.0])
def test_a_slow_host_hides_masks_behind_the_rest_of_the_launch(device: float) -> None:
    """A step takes longer only by building the draw with masks and launching it separately."""
    times = Times(device=device, masks=1.0)
    plain, step = (step_of(times, grammars=grammars) for grammars in (False, True))
    assert times.masks < times.launch * (1 - 1 / PIECES)
    assert step.waits == 0
    assert step.period == pytest.approx(plain.period + times.draw + times.apart)


@given(st.builds(Times, device=MS, masks=MS, prepare=MS, launch=MS, deliver=MS))
def test_grammars_cost_no_more_than_their_parts_one_after_the_other(times: Times) -> None:
    plain, step = (step_of(times, grammars=grammars) for grammars in (False, True))
    serial = times.masks + times.draw + times.apart + times.read + times.sample + times.device
    assert plain.period - 1e-6 <= step.period <= plain.period + serial + 1e-6
