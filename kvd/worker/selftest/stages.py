"""Measures the parts of a load."""

from __future__ import annotations

import time


class Stages:
    """Measures consecutive parts of a load."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._since = "imports", time.monotonic()

    def begin(self, name: str) -> None:
        """End the current part and begin the next one; parts of one name are added up."""
        now = time.monotonic()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now
