"""The memory limit for dense copies that steps make of quantized pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Scratch:
    """Counts dense copies that are alive, or will be once lazy steps are evaluated."""

    limit: int = 256 * 1024 * 1024
    """Bytes that dense copies may take at once."""
    used: int = 0

    def add(self, nbytes: int) -> bool:
        """Count a dense copy. Returns whether the limit is reached: the caller evaluates then."""
        self.used += nbytes
        if self.used < self.limit:
            return False
        self.used = 0
        return True

    def reserve(self, nbytes: int) -> bool:
        """Count dense copies that the caller is about to make.

        Returns whether the earlier copies must be freed first. The caller frees them by evaluating
        what was computed from them, including by steps in flight.
        """
        exceeds = self.used > 0 and self.used + nbytes > self.limit
        self.used = nbytes if exceeds else self.used + nbytes
        return exceeds

    def clear(self) -> None:
        """Forget all copies after an evaluation."""
        self.used = 0
