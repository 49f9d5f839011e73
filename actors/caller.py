"""One request from inside the daemon's process, without a socket or a session.

The last event is always delivered, even if the daemon stops before the request ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from actors import mail
from actors.machines import admission_events
from actors.runtime.actor import Actor, MailboxFull, Ref
from protocol.embedding import Embed
from protocol.errors import Draining, KvdError, Overloaded
from protocol.messages import Error, Event, Generate, is_last


class Call:
    """Handle of a running request; made by `System.generate`."""

    def __init__(self, caller: Ref[mail.ClientMail]) -> None:
        self._caller = caller

    def cancel(self) -> None:
        """Cancel the request within a step; no more events are delivered. Idempotent."""
        self._caller.tell(mail.ConnectionClosed(), beyond_limit=True)


class Caller(Actor[mail.ClientMail]):
    """Submits one request to the router and passes its events to a callback."""

    def __init__(
        self,
        rid: str,
        request: Generate | Embed,
        deliver: Callable[[Event], None],
        router: Ref[mail.RouterMail],
    ) -> None:
        self._rid = rid
        self._request = request
        self._deliver = deliver
        self._router = router
        self._open = True
        self._end: KvdError = Draining("the daemon stops")
        """The error delivered if this actor ends before its request."""

    def on_start(self) -> None:
        try:
            self._router.tell(
                mail.SubmitRequest(self._rid, self._request, self.ref, journaled=False)
            )
        except MailboxFull as error:
            self._end = Overloaded(error.message, retry_after_s=1.0)
            self.stop()

    def receive(self, message: mail.ClientMail) -> None:
        match message:
            case mail.Deliver(event=event):
                self._pass_on(event)
            case mail.ConnectionClosed():
                self._cancel()
                self.stop()
            case mail.BytesReceived():
                raise AssertionError("a caller has no socket")
            case _:
                assert_never(message)

    def on_stop(self) -> None:
        if self._open:
            self._cancel()
            self._deliver(Error(id=self._request.id, error=self._end.info()))

    def _pass_on(self, event: Event) -> None:
        try:
            self._deliver(event)
        except BaseException:
            self._cancel()  # the callback is broken, so nothing more is delivered
            raise
        if is_last(event):
            self._open = False
            self.stop()

    def _cancel(self) -> None:
        if self._open:
            self._open = False
            self._router.tell(
                mail.AdmissionEvent(admission_events.RequestCancelled(self._rid)), beyond_limit=True
            )
