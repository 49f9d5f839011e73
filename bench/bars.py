"""A limit of a measurement, and the measured value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A limit and what was measured."""

    what: str
    value: float
    limit: float
    at_least: bool = False
    """Whether the limit is the smallest value that passes instead of the largest."""

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit; never if it is nan."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        word = "at least" if self.at_least else "at most"
        verdict = "pass" if self.passed else "MISS"
        return f"{self.what}: {self.value:.3f}, {word} {self.limit:g}: {verdict}"

    def as_dict(self) -> dict[str, Any]:
        """Return the bar for a JSON file."""
        return {**asdict(self), "passed": self.passed}
