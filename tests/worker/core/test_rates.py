"""The measured rates, and how the rate of reading recovers from failures."""

from __future__ import annotations

import pytest

from kvd.worker.core.rates import Rates

GB = 1e9


def rate(rates: Rates) -> float:
    return 1 / rates.seconds("read", 1)


@pytest.mark.parametrize(("failed", "calls"), [(0.3 * GB, 15), (0.0, 110)])
def test_a_rate_recovers_after_a_failure(failed: float, calls: int) -> None:
    rates = Rates()
    before = rate(rates)
    rates.note("read", 2 * GB, 1.0)
    rates.note_failure("read", failed, 1.0)
    assert rate(rates) == pytest.approx(max(failed, before / 1000))
    found = []
    for _ in range(calls):
        rates.recover("read")
        found.append(rate(rates))
    assert found == sorted(found)
    assert 0.5 * before < found[-1] <= 1.001 * before


def test_recovery_lowers_no_rate() -> None:
    rates = Rates()
    rates.note("read", 5 * GB, 1.0)
    rates.recover("read")
    assert rate(rates) == pytest.approx(5 * GB)


def test_a_disk_that_stays_slow_is_tried_by_few_prompts() -> None:
    """50 MB/s where 200 MB/s are as fast as prefill."""
    rates, tried = Rates(), 0
    for _ in range(200):
        if rate(rates) > 0.2 * GB:
            tried += 1
            rates.note_failure("read", 0.05 * GB, 1.0)
        else:
            rates.recover("read")
    assert tried < 20


def test_a_failure_above_the_initial_rate_is_forgotten_after_a_while() -> None:
    """Prefill may be so fast that only reads far above the initial rate are worth it."""
    rates = Rates()
    rates.note_failure("read", 3 * GB, 1.0)
    for _ in range(19):
        rates.recover("read")
        assert rates.is_measured("read")
    rates.recover("read")
    assert not rates.is_measured("read")


def test_a_rate_that_was_measured_by_complete_work_is_not_forgotten() -> None:
    rates = Rates()
    rates.note_failure("read", 3 * GB, 1.0)
    rates.note("read", 2 * GB, 1.0)
    for _ in range(50):
        rates.recover("read")
    assert rate(rates) > GB
