"""How many pages requests take in the worst case, by the level of the ladder that they run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.worker.cache.scheme import full_pages


def _full(length: int, _level: int) -> int:
    return full_pages(length)


@dataclass(frozen=True)
class Sizes:
    """Pages of one unit, whatever the level: a lower level takes fewer of them.

    ``pages_for(length, level)``: what a row fills at most on its way to that length.
    ``own_pages(start, end, level)``: what each further choice of a request adds when it goes its
    own way from ``start``; absent: all, as if nothing were shared. ``levels``: of the ladder.
    """

    pages_for: Callable[[int, int], int] = _full
    own_pages: Callable[[int, int, int], int] | None = None
    levels: int = 1

    @property
    def lowest(self) -> int:
        """The last level: the model's quality floor."""
        return self.levels - 1

    def of(self, prompt_len: int, max_new: int, level: int) -> tuple[int, int]:
        """Return the most pages of a request's first choice, and what each further one adds."""
        end = prompt_len + max_new
        first = self.pages_for(end, level)
        if self.own_pages is None:
            return first, first
        return first, self.own_pages(prompt_len - 1, end, level)
