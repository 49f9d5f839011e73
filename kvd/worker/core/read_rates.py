"""Decides from measured rates whether a stored prefix is read, and when a read takes too long.

Bytes of files that the system's page cache holds have another rate than others
(`kvd.worker.core.rates`). The *share* of a read is the share of its bytes that the page cache held
when it began, from 0 to 1; None: it is not known.
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.worker.core.rates import Rates, Work

READ_MARGIN = 1.5
"""A prompt is read if prefill is estimated to take this many times as long. On two busy cores, half
of 14 reads took 1.4 times as long as estimated, or longer."""
LEAST_READ_SECONDS = 1.0
"""Seconds of steps that a read may take even if prefill is estimated to take less."""
FIRST_READ_SECONDS = 0.25
"""Least prefill in place of which a worker tries its first read of each kind, whatever is
estimated: its rate is not known before. One H200 prefills 8192 tokens of an 8B model at 1.1 GB/s of
pages, and reads them at 3 GB/s."""
FIRST_READ_SHARE = 0.1
"""Share of the estimated prefill after which that read ends, unless the rest, at its rate so far,
takes less time than prefill."""
FIRST_CHECK_SECONDS = 0.1
"""Least seconds before that."""
CACHED_SHARE = 0.9
"""A read measures the rate ``read`` if its share is at least this, else ``read_from_disk``."""


class Limit(NamedTuple):
    """The seconds that a read may take."""

    check_s: float
    """Seconds after which it ends, unless the rest, at its rate so far, takes less time than
    prefill."""
    end_s: float
    """Seconds of steps after which it ends in any case."""
    is_first: bool
    """Whether its rate is not measured yet. Then ``check_s`` are seconds of I/O and copies, because
    steps may be long for other reasons. Otherwise they are seconds of steps."""


class ReadRates:
    """The reads of one engine."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def limit(self, nbytes: int, prefill_s: float, share: float = 1.0) -> Limit | None:
        """Return the limit of a read of ``nbytes``; None: prefill is better."""
        cached = share * nbytes
        seconds = self._rates.seconds("read", cached)
        seconds += self._rates.seconds("read_from_disk", nbytes - cached)
        if READ_MARGIN * seconds < prefill_s:
            check_s = max(LEAST_READ_SECONDS, prefill_s)
            return Limit(check_s, 2 * check_s, is_first=False)
        if prefill_s >= FIRST_READ_SECONDS and not self._rates.is_measured(_work(share)):
            check_s = max(FIRST_CHECK_SECONDS, FIRST_READ_SHARE * prefill_s)
            return Limit(check_s, prefill_s, is_first=True)
        return None

    def rest_seconds(self, nbytes: int, share: float, done: int, seconds: float) -> float:
        """Return how long the rest of a read takes, if ``done`` bytes took ``seconds``.

        If the disk has a part in it, cached bytes are assumed to come last.
        """
        if not done:
            return float("inf")
        if _work(share) == "read":
            return seconds * (nbytes - done) / done
        from_disk = max(0.0, (1 - share) * nbytes - done)
        return self._rates.seconds("read", nbytes - done - from_disk) + seconds * from_disk / done

    def note(self, nbytes: int, share: float | None, seconds: float) -> None:
        """Add a complete read."""
        if (work := _work(share)) == "read":
            self._rates.note(work, nbytes, seconds)
            return
        # The cached bytes are assumed to take the estimated time. The rest measures the disk, which
        # is not faster than the page cache.
        cached = (share or 0.0) * nbytes
        least_s = self._rates.seconds("read", nbytes - cached)
        disk_s = max(least_s, seconds - self._rates.seconds("read", cached))
        self._rates.note(work, nbytes - cached, disk_s)

    def note_failure(self, nbytes: int, share: float | None, done: int, seconds: float) -> None:
        """Add a read of ``nbytes`` that took too long: ``done`` bytes took ``seconds``."""
        if (work := _work(share)) == "read":
            self._rates.note_failure(work, done, seconds)
            return
        cached = (share or 0.0) * nbytes
        # Either cached bytes came first, or all had their share. The lower rate counts.
        from_disk = max(done - cached, min(done, nbytes - cached) * (1 - (share or 0.0)))
        self._rates.note_failure(work, from_disk, seconds)

    def recover(self, share: float) -> None:
        """Raise the rate of reads that are not tried (`Rates.recover`)."""
        self._rates.recover(_work(share))


def _work(share: float | None) -> Work:
    """Return which rate a read measures. If its share is not known, the disk has not answered."""
    return "read" if share is not None and share >= CACHED_SHARE else "read_from_disk"
