"""Prompts with the same beginning are not prefilled side by side: one waits for the other.

A prompt's *path* has one name per whole chunk; the n-th name identifies the first n chunks. Two
prompts have the same n-th name if their first n chunks are equal. A request whose prompt has not
started waits while a request before it in the queue order prefills a chunk that both share. It then
finds that chunk in the prefix cache. If the first one's beginning is read from the prefix store,
requests that share all of it wait for the end of the read. ::

    ahead          |--chunk---|--chunk---|=chunk now|-chunk-|
    waits          |--chunk---|--chunk---|--chunk---|-own-|
    does not wait  |--chunk---|--own--|                      its shared chunk is done and cached

**No deadlock.** The first request in order never waits, so one can always prefill. A request waits
only for requests before it, whose chunks the bound of `kvd.worker.scheduling.prefill_order` already
counts. Reads end after a bounded time. Other suspended requests, preempted and finished ones are
never waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.worker.scheduling.request import ScheduledRequest


def without_waiting(requests: Iterable[ScheduledRequest], chunk: int) -> list[ScheduledRequest]:
    """Return the requests whose prompt may start or continue, in queue order."""
    started: list[ScheduledRequest] = []
    able = []
    for request in sorted(requests, key=lambda request: request.queue_key):
        if request.prompt_started:
            started.append(request)
            if request.reads_prompt:
                continue
        elif shares_next_chunk(request, started, chunk):
            continue
        able.append(request)
    return able


def shares_next_chunk(
    request: ScheduledRequest, started: Iterable[ScheduledRequest], chunk: int
) -> bool:
    for other in started:
        at = other.prefilled // chunk - other.reads_prompt
        if 0 <= at < min(len(other.path), len(request.path)) and other.path[at] == request.path[at]:
            return True
    return False
