"""Pages that a request fills in the worst case, by precision level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.worker.cache.scheme import full_pages


def _full(length: int, _level: int) -> int:
    return full_pages(length)


@dataclass(frozen=True)
class ReservationSizes:
    """Worst cases in one page unit for all levels: lower levels take fewer pages.

    ``pages_for(length, level)``: pages that a row fills at most until it has ``length`` tokens.
    ``own_pages(start, end, level)``: pages that each further choice adds between these lengths.
    Without it, choices share nothing. ``levels``: number of precision levels.
    """

    pages_for: Callable[[int, int], int] = _full
    own_pages: Callable[[int, int, int], int] | None = None
    levels: int = 1

    @property
    def lowest_level(self) -> int:
        """The last level: the model's quality floor."""
        return self.levels - 1

    def of(self, prompt_len: int, max_new: int, level: int) -> tuple[int, int]:
        """Return the pages of a request's first choice, and those that each further one adds."""
        end = prompt_len + max_new
        first = self.pages_for(end, level)
        if self.own_pages is None:
            return first, first
        return first, self.own_pages(prompt_len - 1, end, level)
