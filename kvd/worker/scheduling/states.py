"""The state of each request, and the account of rows and pages that belongs to it.

::

    add              admit                advance               remove
    ---> queued -------------> prefilling --------> decoding ------------>
            ^                      |                    |
            | requeue              |      preempt       |
            +------- preempted <---+--------------------+

Prefilling and decoding requests are admitted: each of their choices takes a row, and their pages
are reserved. Other requests have no rows; a preempted request may keep pages.
"""

from __future__ import annotations

from kvd.worker.scheduling.queue import RequestQueue
from kvd.worker.scheduling.request import ScheduledRequest
from protocol.errors import LocalProtocolError


class RequestStates:
    """The requests of one scheduler. Illegal transitions raise `LocalProtocolError`."""

    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.requests: dict[str, ScheduledRequest] = {}
        """All requests. Each is in ``queue`` or in exactly one of the next three dicts."""
        self.prefilling: dict[str, ScheduledRequest] = {}
        self.decoding: dict[str, ScheduledRequest] = {}
        self.preempted: dict[str, ScheduledRequest] = {}
        self.rows = 0
        self.reserved_pages = 0

    def find(self, rid: str) -> ScheduledRequest:
        request = self.requests.get(rid)
        if request is None:
            raise LocalProtocolError(f"request {rid} is not scheduled")
        return request

    def is_admitted(self, request: ScheduledRequest) -> bool:
        return request.rid in self.prefilling or request.rid in self.decoding

    @property
    def admitted(self) -> list[ScheduledRequest]:
        return [*self.prefilling.values(), *self.decoding.values()]

    @property
    def active(self) -> int:
        """Number of admitted requests that are neither suspended nor stalled."""
        return sum(not (one.suspended or one.stalled) for one in self.admitted)

    @property
    def stalled(self) -> bool:
        """Whether a decoding request waits for a larger reservation."""
        return any(one.stalled and not one.suspended for one in self.decoding.values())

    @property
    def kept_behind_head(self) -> int:
        """Pages kept by requests that are not admitted, the head of the queue excepted."""
        head = self.queue.head
        requests = [*self.queue, *self.preempted.values()]
        return sum(request.kept_pages for request in requests if request is not head)

    def add(self, request: ScheduledRequest) -> None:
        self.requests[request.rid] = request
        self.queue.add(request)

    def admit(self, request: ScheduledRequest) -> None:
        """Move a request out of the queue; take its rows and pages."""
        self.queue.remove(request)
        self.reserved_pages += request.missing_pages
        self.rows += request.choices
        request.kept_pages = 0
        request.was_admitted = True
        self.advance(request, request.prefilled)

    def advance(self, request: ScheduledRequest, prefilled: int) -> None:
        """Set the prefilled tokens of an admitted request; with none remaining it decodes."""
        request.prefilled = prefilled
        if request.remaining:
            self.prefilling[request.rid] = request
        else:
            self.prefilling.pop(request.rid, None)
            self.decoding[request.rid] = request

    def restart_prefill(self, request: ScheduledRequest) -> None:
        request.prompt_started = False
        request.prefilled = 0
        if self.is_admitted(request):
            self.decoding.pop(request.rid, None)
            self.advance(request, 0)

    def remove(self, request: ScheduledRequest) -> None:
        """Forget a request in any state; free its rows and pages."""
        del self.requests[request.rid]
        if self.is_admitted(request):
            self._release(request)
            return
        if self.preempted.pop(request.rid, None) is None:
            self.queue.remove(request)
        self.reserved_pages -= request.kept_pages

    def remove_choice(self, rid: str) -> None:
        """Free the row and the pages of one of several choices. The last one ends with `remove`."""
        request = self.decoding.get(rid)
        if request is None or request.choices == 1:
            raise LocalProtocolError(f"request {rid} does not decode several choices")
        request.choices -= 1
        self.rows -= 1
        self.reserved_pages -= request.further_choice_pages

    def resize(self, request: ScheduledRequest, level: int, first: int, further: int) -> None:
        """Set a request's level, and the pages of its first choice and of each further one."""
        before = request.pages
        request.level = level
        request.first_choice_pages, request.further_choice_pages = first, further
        if self.is_admitted(request):
            self.reserved_pages += request.pages - before

    def set_suspended(self, rid: str, suspended: bool) -> None:
        request = self._admitted(rid)
        if request.suspended == suspended:
            state = "suspended already" if suspended else "not suspended"
            raise LocalProtocolError(f"request {rid} is {state}")
        request.suspended = suspended
        request.reads_prompt = False

    def preempt(self, rid: str, kept_pages: int) -> None:
        """Free an admitted request's rows, and its pages except ``kept_pages``.

        ``kept_pages`` may exceed `ScheduledRequest.pages`: it includes the kept tails. While a
        request is admitted, its tails are counted with its rows instead.
        """
        request = self._admitted(rid)
        if kept_pages < 0:
            raise LocalProtocolError(f"request {rid} cannot keep {kept_pages} pages")
        self._release(request)
        request.kept_pages = kept_pages
        self.reserved_pages += kept_pages
        self.preempted[rid] = request

    def reduce_kept(self, rid: str, kept_pages: int) -> None:
        """Lower the pages that a request keeps while it is preempted or queued again."""
        request = self.find(rid)
        if self.is_admitted(request) or not 0 <= kept_pages <= request.kept_pages:
            raise LocalProtocolError(
                f"request {rid} is not preempted with at least {kept_pages} kept pages"
            )
        self.reserved_pages -= request.kept_pages - kept_pages
        request.kept_pages = kept_pages

    def requeue_preempted(self, rid: str) -> None:
        request = self.preempted.pop(rid, None)
        if request is None:
            raise LocalProtocolError(f"request {rid} is not preempted")
        self.queue.add(request)

    def _admitted(self, rid: str) -> ScheduledRequest:
        request = self.prefilling.get(rid) or self.decoding.get(rid)
        if request is None:
            raise LocalProtocolError(f"request {rid} is not admitted")
        return request

    def _release(self, request: ScheduledRequest) -> None:
        self.prefilling.pop(request.rid, None)
        self.decoding.pop(request.rid, None)
        request.suspended = request.reads_prompt = False
        self.rows -= request.choices
        self.reserved_pages -= request.pages
