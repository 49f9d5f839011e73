"""Whether prefixes are read, by the rates of the page cache and of the disk."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.core.rates import Rates
from kvd.worker.core.read_rates import FIRST_CHECK_SECONDS, READ_MARGIN, ReadRates

GB = 10**9
SHARES = st.floats(0, 1)


def reads(**measured: float) -> tuple[ReadRates, Rates]:
    """Return reads with measured rates, in GB/s."""
    rates = Rates()
    for work, speed in measured.items():
        rates.note(work, speed * GB, 1.0)  # type: ignore[arg-type]
    return ReadRates(rates), rates


def test_both_rates_count_for_their_bytes() -> None:
    found, _ = reads(read=10.0, read_from_disk=1.0)
    for share, seconds in ((1.0, 0.2), (0.5, 1.1), (0.0, 2.0)):
        assert found.limit(2 * GB, READ_MARGIN * seconds * 1.01, share) is not None
        assert found.limit(2 * GB, READ_MARGIN * seconds * 0.99, share) is None


@pytest.mark.parametrize(("share", "work"), [(1.0, "read"), (0.5, "read_from_disk")])
def test_the_first_read_of_each_kind_is_tried(share: float, work: str) -> None:
    known = {"read": 1e-3, "read_from_disk": 1e-3}
    del known[work]
    found, _ = reads(**known)
    limit = found.limit(8 * GB, 2.0, share)
    assert limit is not None
    assert limit == (0.2, 2.0, True)
    assert found.limit(8 * GB, 0.2, share) is None
    short = found.limit(8 * GB, 0.3, share)
    assert short is not None
    assert short.check_s == FIRST_CHECK_SECONDS


def test_a_rest_that_is_cached_is_expected_to_be_fast() -> None:
    """The last segment is on disk, its base in the page cache."""
    found, _ = reads(read=10.0, read_from_disk=1.0)
    assert found.rest_seconds(GB, 0.5, 450_000_000, 1.0) == pytest.approx(0.05 + 0.05 / 0.45)
    assert found.rest_seconds(GB, 0.5, 600_000_000, 1.0) == pytest.approx(0.04)


def test_a_slow_page_cache_is_measured_by_its_own_progress() -> None:
    found, _ = reads(read=10.0)
    assert found.rest_seconds(GB, 1.0, GB // 4, 1.0) == pytest.approx(3.0)
    assert found.rest_seconds(GB, 1.0, 0, 1.0) == math.inf


def test_a_read_that_fails_again_and_again_lowers_the_disk_s_rate() -> None:
    """Most bytes are cached and come first; the disk makes 50 MB/s."""
    found, _ = reads(read=10.0)
    tries = 0
    while found.limit(GB, 1.0, 0.85) is not None:
        found.note_failure(GB, 0.85, 950_000_000, 2.0)
        tries += 1
        assert tries == 1, "one try is enough"


@pytest.mark.parametrize(
    ("share", "seconds", "speed"),
    [
        (0.5, 0.55, 1.0),  # 0.05 s for the cached half
        (0.0, 0.5, 2.0),
        (0.8, 0.0801, 10.0),  # the disk is not faster than the page cache
        (0.8, 0.01, 10.0),
    ],
)
def test_a_complete_read_measures_the_disk(share: float, seconds: float, speed: float) -> None:
    found, rates = reads(read=10.0)
    found.note(GB, share, seconds)
    assert 1 / rates.seconds("read_from_disk", 1) == pytest.approx(speed * GB)
    assert 1 / rates.seconds("read", 1) == pytest.approx(10 * GB)


def test_if_the_share_is_not_known_the_disk_has_not_answered() -> None:
    found, rates = reads(read=10.0)
    found.note_failure(GB, None, 0, 1.0)
    assert not rates.seconds("read", GB) > 0.2
    assert rates.seconds("read_from_disk", GB) > 100


@given(SHARES, st.floats(1e-9, 100), st.integers(1, 10**12), SHARES)
def test_rates_stay_finite_and_positive(
    share: float, seconds: float, nbytes: int, part: float
) -> None:
    found, rates = reads()
    found.note(nbytes, share, seconds)
    found.note_failure(nbytes, share, int(part * nbytes), seconds)
    found.recover(share)
    for work in ("read", "read_from_disk"):
        taken = rates.seconds(work, 1)  # type: ignore[arg-type]
        assert math.isfinite(taken)
        assert taken > 0
    assert found.rest_seconds(nbytes, share, int(part * nbytes), seconds) >= 0
