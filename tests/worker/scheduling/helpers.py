"""Schedulers, admissions and requests for tests."""

from __future__ import annotations

from kvd.worker.cache.scheme import full_pages
from kvd.worker.scheduling.admission import Admission
from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.request import QueueKey, ScheduledRequest
from kvd.worker.scheduling.scheduler import ReservationSizes, Scheduler

PAGES = 40
CHUNK = 128

BASE = 1000
"""Base of a budget, in bytes. ``PAGE``: bytes of a page; ``ROW_PAGES``: pages of a row's tail;
``IDLE``: pages that an idle engine keeps."""
PAGE = 10
ROW_PAGES = 3
IDLE = 8


def within(total):
    """Return the ``missing_pages`` argument of a plan for ``total`` pages of memory."""
    return lambda pages, rows: pages - total


def grouping(**changes):
    return Scheduler(**({"max_rows": 8, "chunk": CHUNK, "group": True} | changes))


def own(start, end, _level=0):
    """Return the pages that a choice adds to the shared prompt with full attention."""
    return full_pages(end) - full_pages(start)


def request_of(rid, prompt_len, number=0, priority=0, **fields):
    """Return a request with queue key ``number``, less 1000 per step of priority."""
    key = QueueKey(number - 1000 * priority, number)
    return ScheduledRequest(rid, prompt_len, 1, key, priority, None, choices=1, **fields)


def with_two_levels(pages=IDLE) -> Admission:
    """Return an admission with two levels; pages of the lower one are half as large."""
    sizes = ReservationSizes(
        pages_for=lambda length, level: -(-length // 64 // (1 + level)), levels=2
    )
    return Admission(
        Scheduler(max_rows=5, chunk=128, sizes=sizes),
        PageBudget(BASE, PAGE, BASE + pages * PAGE, seq=1),
        row_pages=ROW_PAGES,
        idle_pages=IDLE,
    )
