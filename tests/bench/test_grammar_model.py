"""The model of steps with grammars, and that the engine's choice of an order follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.grammar_model import Times, speed, step_of
from kvd.worker.core.read_order import TRIAL, ReadOrder

MS = st.floats(0.05, 8.0)


def test_a_slow_device_hides_masks_if_passes_are_launched_first() -> None:
    times = Times(device=8.0, masks=1.0)
    assert speed("launch first", times) == pytest.approx(1.0)
    assert speed("read first", times) < 0.95


def test_a_slow_host_launches_pass_and_draw_together_if_tokens_are_read_first() -> None:
    times = Times(device=1.0, masks=0.2)
    assert speed("read first", times) > 0.9
    assert speed("launch first", times) < 0.85
    slow = Times(device=1.0, masks=1.5)
    assert speed("read first", slow) < 0.85


def test_text_is_written_while_masks_are_computed() -> None:
    """Masks that take no longer than that cost as much as reading tokens and launching draws."""
    times = Times(device=1.0, masks=0.8)
    step = step_of("launch first", times)
    assert step.waits == 0
    assert step.period == pytest.approx(step_of("without", times).period + times.draw + times.apart)


@given(st.builds(Times, device=MS, masks=MS, prepare=MS, launch=MS, deliver=MS))
def test_the_engine_chooses_the_order_with_shorter_steps(times: Times) -> None:
    found = {first: step_of("read first" if first else "launch first", times)
             for first in (False, True)}  # fmt: skip
    order = ReadOrder()
    for _ in range(2 * TRIAL):
        order.note(found[order.reads_first].spent)
    assert found[order.reads_first].period <= found[not order.reads_first].period + 1e-6
