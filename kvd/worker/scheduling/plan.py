"""What the scheduler decided for one step."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.worker.scheduling.request import Chunk


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests to admit, prefill and decode in the next step."""

    admitted: tuple[str, ...]
    """Requests that just left the queue, in order. They also appear in the fields below."""
    group: tuple[Chunk, ...]
    """Chunks of one prefill pass: a single chunk, or the last chunks of several requests."""
    decode: tuple[str, ...]
    """Requests that decode: one token for each of their running choices."""
    missing_pages: int
    """Pages that the head of the queue lacks. 0 if the queue is empty or lacks only rows."""
    queue_missing_pages: int = 0
    """Pages lacking for all queued requests for which enough rows are free."""
    resumed: tuple[str, ...] = ()
    """The requests of ``admitted`` that were preempted before."""
