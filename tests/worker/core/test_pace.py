"""The time that steps spend on transfers."""

from __future__ import annotations

import pytest

from kvd.worker.core.pace import MOST_SECONDS, STEP_SHARE, Pace


def test_a_step_without_rows_has_the_most_time() -> None:
    pace = Pace()
    pace.note_usual(0.001)
    assert pace.seconds(decodes=False) == MOST_SECONDS


@pytest.mark.parametrize(("step_s", "expected"), [(0.008, STEP_SHARE * 0.008), (1.0, MOST_SECONDS)])
def test_a_step_gives_a_share_of_the_usual_one(step_s: float, expected: float) -> None:
    pace = Pace()
    for _ in range(5):
        pace.note_usual(step_s)
    assert pace.seconds(decodes=True) == pytest.approx(expected)


def test_one_long_step_changes_little() -> None:
    pace = Pace()
    for _ in range(50):
        pace.note_usual(0.004)
    pace.note_usual(0.008)
    found = pace.seconds(decodes=True)
    assert 0.004 < found / STEP_SHARE < 0.0045
