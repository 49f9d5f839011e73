"""The order in which traces are played; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.bench import traces
from kvd.bench.traces import Trace

_TRACE_AGAIN, _ATTEMPT = 1000, 1_000_000
"""Numbers added to that of a run, so that no two plays have prompts of equal words."""


@dataclass(frozen=True)
class Round:
    """One run of a trace on every side that takes part in it."""

    trace: str
    run: int
    again: int = 0
    """Number of earlier places of this trace in the list of traces."""

    @property
    def title(self) -> str:
        """Name of the results: ``steady``, and ``steady #2`` where the list has it again."""
        return title(self.trace, self.again)

    def build(self, seed: int) -> Trace:
        """Return the requests. Repeated plays of a run have the same lengths and times."""
        return traces.build(self.trace, seed, self.run)

    def words(self, attempt: int) -> int:
        """Return the number that selects the prompts' words.

        Every attempt has other words, so that no server finds them in a cache.
        """
        return self.run + _TRACE_AGAIN * self.again + _ATTEMPT * attempt


def title(trace: str, again: int) -> str:
    """Return the name of the results of a trace that was played ``again`` times before."""
    return f"{trace} #{again + 1}" if again else trace


def plan(names: Sequence[str], runs: int) -> Iterator[Round]:
    """Yield the rounds: all runs of a trace, then all of the next one, in the order of ``names``.

    A trace may be named several times: ``steady long steady`` shows what `long` leaves behind.
    """
    seen: Counter[str] = Counter()
    for name in names:
        for run in range(runs):
            yield Round(name, run, seen[name])
        seen[name] += 1
