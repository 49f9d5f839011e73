"""One completion for somebody inside this process: no bytes, no session, one actor for each.

What `actors.client` is to a socket, for those who have messages already, such as `kvd.http`. The
end is always told, also when the daemon stops before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.runtime.actor import Actor, MailboxFull
from protocol.errors import Draining, Overloaded
from protocol.messages import Error, is_last

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.mail import ClientMail, RouterMail
    from actors.runtime.actor import Ref
    from protocol.errors import KvdError
    from protocol.messages import Event, Generate


class Call:
    """The caller's end; made by `System.generate`."""

    def __init__(self, caller: Ref[ClientMail]) -> None:
        self._caller = caller

    def cancel(self) -> None:
        """Want no more of it: it ends within a step, and nothing more is delivered. Idempotent."""
        self._caller.tell(mail.Closed(), beyond_limit=True)


class Caller(Actor["ClientMail"]):
    """Hands a request to the router and its events to whoever called."""

    def __init__(
        self,
        rid: str,
        request: Generate,
        deliver: Callable[[Event], None],
        router: Ref[RouterMail],
    ) -> None:
        self._rid = rid
        self._request = request
        self._deliver = deliver
        self._router = router
        self._open = True
        """Its end was neither told nor renounced."""
        self._end: KvdError = Draining("the daemon stops")
        """What is told if this actor ends before its request."""

    def on_start(self) -> None:
        """Hand the request in."""
        try:
            self._router.tell(mail.Wanted(self._rid, self._request, self.ref, kept=False))
        except MailboxFull as error:
            self._end = Overloaded(error.message, retry_after_s=1.0)
            self.stop()

    def receive(self, message: ClientMail) -> None:
        """Handle a message; who fails at being told ends its request."""
        match message:
            case mail.Deliver(event=event):
                self._hear(event)
            case mail.Closed():
                self._cancel()
                self.stop()
            case mail.Received():
                raise AssertionError("a caller has no socket")
            case _:
                assert_never(message)

    def on_stop(self) -> None:
        """Cancel what runs, and tell the end if nobody has."""
        if self._open:
            self._cancel()
            self._deliver(Error(id=self._request.id, error=self._end.info()))

    def _hear(self, event: Event) -> None:
        try:
            self._deliver(event)
        except BaseException:
            self._cancel()  # it cannot be told more
            raise
        if is_last(event):
            self._open = False
            self.stop()

    def _cancel(self) -> None:
        if self._open:
            self._open = False
            self._router.tell(mail.Unwanted(self._rid), beyond_limit=True)
