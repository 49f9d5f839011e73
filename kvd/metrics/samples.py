"""One scrape's values, by metric: `kvd.metrics.gather` fills it, `kvd.metrics.families` encodes it.

Nothing in it changes afterwards: that is done in a thread, while the daemon goes on counting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvd.metrics.catalogue import Metric

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Buckets:
    """A histogram's: how many were of each size, and the sum of all."""

    counts: tuple[int, ...]
    total: float


Value = int | float | Buckets


@dataclass
class Samples:
    """Values by metric and labels."""

    found: dict[Metric, dict[Labels, Value]] = field(default_factory=dict)

    def put(self, metric: Metric, value: Value, *labels: str) -> None:
        """Say what a series is now."""
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has labels {metric.labels}, and not {labels}")
        self.found.setdefault(metric, {})[labels] = value

    def put_all(self, metric: Metric, values: Mapping[str, float], *labels: str) -> None:
        """Say it of several, whose last label is the key."""
        for name, value in values.items():
            self.put(metric, value, *labels, name)

    def put_one_of(self, metric: Metric, this: str, words: Iterable[str], *labels: str) -> None:
        """Say which of these words holds."""
        for word in words:
            self.put(metric, int(word == this), *labels, word)
