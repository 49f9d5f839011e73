"""Reservations that grow: a request reserves its prompt and a part of its completion at a time.

::

    prompt | generated |<-- at least 256, at most 512 tokens -->|  not reserved yet  | max_new

When less than half of `RESERVED_TOKENS` is left, the reservation is extended to `RESERVED_TOKENS`
ahead, or to ``max_new``. If memory is short, the most valuable request is extended first, and no
other one before it. A request whose reservation is used up is *stalled*: it decodes no token until
its reservation is extended or it is preempted.

Before a queued request is admitted, all running ones are extended as far as they can be. They then
grow for 256 tokens without a memory request, and the new request is not preempted at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.worker.scheduling.request import ReservationSizes, ScheduledRequest
from kvd.worker.scheduling.states import RequestStates

MissingPages = Callable[[int, int], int]
"""``(pages, rows)``: pages that the grant lacks to reserve this many; 0 or less if they fit."""


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """The outcome of one round of growth."""

    lacking: ScheduledRequest | None = None
    """The most valuable request whose reservation could not be extended."""
    missing_pages: int = 0
    """Pages that it lacks."""
    pages: int = 0
    """Pages by which it and those behind it would be extended."""


class Growth:
    """Extends the reservations of one scheduler's requests, to ``ahead`` tokens."""

    def __init__(self, states: RequestStates, sizes: ReservationSizes, ahead: int) -> None:
        self.ahead = ahead
        self._states = states
        self._sizes = sizes
        self.too_large: Callable[[int, int], bool] = lambda _pages, _rows: False
        """``(pages, rows)``: whether this many exceed the whole budget."""

    def sizes_of(self, request: ScheduledRequest, new: int, level: int) -> tuple[int, int]:
        """Return the pages of a request's first and of each further choice, for ``new`` tokens."""
        return self._sizes.of(request.prompt_len, new, level)

    def fits(self, request: ScheduledRequest, new: int, level: int) -> bool:
        """Return whether the whole budget suffices for ``new`` tokens of each choice."""
        return not self.too_large(self.pages(request, new, level), request.choices)

    def pages(self, request: ScheduledRequest, new: int, level: int) -> int:
        first, further = self.sizes_of(request, new, level)
        return first + (request.choices - 1) * further

    def target(self, request: ScheduledRequest) -> int:
        """Return up to which token a reservation can be extended now, given the whole budget."""
        least = max(request.reserved_new, request.generated)
        most = max(least, min(request.max_new, request.generated + self.ahead))
        if most == least or self.fits(request, most, request.level):
            return most
        while least < most - 1:  # the largest number of tokens that fits
            middle = (least + most) // 2
            if self.fits(request, middle, request.level):
                least = middle
            else:
                most = middle
        return least

    def extend(self, request: ScheduledRequest) -> None:
        """Extend the reservation of a request in any state to `target`."""
        request.reserved_new = self.target(request)
        pages = self.sizes_of(request, request.reserved_new, request.level)
        self._states.resize(request, request.level, *pages)

    def extend_all(self) -> None:
        for request in self._states.admitted:
            self.extend(request)

    @property
    def pages_ahead(self) -> int:
        """Pages by which `extend_all` would increase the reservations."""
        return sum(self.extra_pages(request) for request in self._states.admitted)

    def extra_pages(self, request: ScheduledRequest) -> int:
        """Return the pages by which `extend` would increase a reservation."""
        if request.ahead >= min(self.ahead, request.max_new - request.generated):
            return 0
        return self.pages(request, self.target(request), request.level) - request.pages

    @property
    def outgrown(self) -> ScheduledRequest | None:
        """A stalled request for which the whole budget is too small, if there is one."""
        for request in self._states.decoding.values():
            if request.stalled and self.target(request) <= request.generated:
                return request
        return None

    def grow(self, missing_pages: MissingPages | None) -> GrowthPlan:
        """Extend all reservations that are due, the most valuable first; None: memory is denied.

        Extensions that take no pages always succeed.
        """
        states, lacking, missing, pages = self._states, None, 0, 0
        for request in self._due():
            extra = self.extra_pages(request)
            if extra <= 0:
                self.extend(request)
                continue
            if missing_pages is None:
                continue
            pages += extra
            lack = missing_pages(states.reserved_pages + extra, states.rows)
            if lacking is None and lack <= 0:
                self.extend(request)
                pages -= extra
            elif lacking is None:
                lacking, missing = request, lack
        return GrowthPlan(lacking, missing, pages)

    def _due(self) -> list[ScheduledRequest]:
        due = [
            request
            for request in self._states.decoding.values()
            if request.ahead < self.ahead // 2 and request.reserved_new < request.max_new
        ]
        return sorted(due, key=value_of, reverse=True)


def value_of(request: ScheduledRequest) -> tuple[int, int]:
    """Return the sort key of requests for preemption: the least valuable first."""
    return request.priority, -request.queue_key.arrival
