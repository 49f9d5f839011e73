"""The values of one scrape. They are immutable, because a thread encodes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvd.metrics.catalogue import Metric

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Buckets:
    """A histogram's values per bucket, and their sum."""

    counts: tuple[int, ...]
    total: float


Value = int | float | Buckets


@dataclass
class Samples:
    """Values by metric and labels."""

    found: dict[Metric, dict[Labels, Value]] = field(default_factory=dict)

    def put(self, metric: Metric, value: Value, *labels: str) -> None:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {labels}")
        self.found.setdefault(metric, {})[labels] = value

    def put_all(self, metric: Metric, values: Mapping[str, float], *labels: str) -> None:
        """Set one series for each value, with its key as the last label."""
        for name, value in values.items():
            self.put(metric, value, *labels, name)

    def put_state(self, metric: Metric, state: str, states: Iterable[str], *labels: str) -> None:
        """Set the series of the current state to 1, and those of the other states to 0."""
        for other in states:
            self.put(metric, int(other == state), *labels, other)
