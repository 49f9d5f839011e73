"""Actors: one mailbox, one task, one message at a time.

`Ref.tell` puts a message into a bounded mailbox. `Ref.ask` also waits for the reply, and always
ends: with the reply, the handler's exception, `ActorDead` or `AskTimeout`. The asker gets the
failure of an ask; the supervisor gets the failure of a tell (`actors.runtime.supervision`).

Handlers are synchronous functions. Slow work runs outside the actor and its result comes back as a
message (`Actor.pipe`); a reply that takes time is a `DeferredReply`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from protocol.errors import InternalError

M = TypeVar("M")
R = TypeVar("R")


class ActorDead(InternalError):
    """The actor ended before it replied."""


class MailboxFull(InternalError):
    """The actor's mailbox has reached its limit."""


class AskTimeout(InternalError):
    """The actor did not reply in time."""


class Ask(msgspec.Struct, Generic[R], frozen=True):
    """Base of messages that have a reply of type R."""


class DeferredReply(Generic[R]):
    """A reply that takes time: the handler returns it, keeps it, and answers it once.

    The actor's death ends it with `ActorDead`. Later answers are ignored.
    """

    def __init__(self) -> None:
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def answer(self, value: R) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)


@dataclass(frozen=True)
class _Envelope(Generic[M]):
    message: M
    reply: asyncio.Future[Any] | None = None
    last: bool = False
    """Whether the actor stops here; `message` is None then."""


class Ref(Generic[M]):
    """Reference to an actor; it stays valid when a supervisor replaces the actor."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.pipes: set[asyncio.Task[None]] = set()
        """Tasks of slow work that the actor started."""
        self._mail: deque[_Envelope[M]] = deque()
        self._wake = asyncio.Event()
        self.alive = True

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def tell(self, message: M, *, beyond_limit: bool = False) -> None:
        """Send a message; a dead actor's messages are dropped. Raises `MailboxFull`.

        `beyond_limit` is for the few messages that must not be lost.
        """
        if self.alive:
            self._put(_Envelope(message), beyond_limit=beyond_limit)

    async def ask(self, message: Ask[R], *, timeout_s: float | None = None) -> R:
        """Send a message and wait for the reply."""
        if not self.alive:
            raise ActorDead(f"{self.name} has ended")
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        # The caller ensures that M contains this Ask; the type system cannot express that.
        self._put(_Envelope(message, reply))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise AskTimeout(f"{self.name} did not reply within {timeout_s} s") from None
        finally:
            # An error in the future refers to this frame. That cycle would keep the message alive.
            del reply

    def _put(self, envelope: _Envelope[M], *, beyond_limit: bool = False) -> None:
        if len(self._mail) >= self.limit and not beyond_limit:
            raise MailboxFull(f"{self.name} has {self.limit} messages waiting")
        self._mail.append(envelope)
        self._wake.set()

    def _close(self) -> None:
        """Close the mailbox; waiting asks get `ActorDead`."""
        self.alive = False
        for envelope in self._mail:
            _fail(envelope.reply, ActorDead(f"{self.name} ended before it replied"))
        self._mail.clear()
        self._wake.set()


class Actor(ABC, Generic[M]):
    """Base of all actors: implement `receive`, and `check` if there are invariants."""

    mailbox_limit = 16_384
    """Maximum waiting messages. One read of a socket produces fewer: the limit bounds memory, not
    traffic."""
    messages_per_pass = 1_000_000
    """Messages handled before other actors run; small for messages that cause many others."""

    ref: Ref[M]
    _stopping = False

    @abstractmethod
    def receive(self, message: M) -> object:
        """Handle a message; the return value is the reply to an ask."""

    def on_start(self) -> None:
        """Initialize a new or restarted actor."""

    def on_restart(self, error: BaseException) -> None:
        """Recover from the previous actor's failure with `error`; called after `on_start`."""

    def on_stop(self) -> None:
        """Clean up at the end, also after a failure without a restart."""

    def check(self) -> None:
        """Raise AssertionError if the actor's state is inconsistent."""

    def stop(self) -> None:
        """Handle no messages after this one."""
        self._stopping = True

    def pipe(
        self,
        work: Coroutine[Any, Any, R],
        done: Callable[[R], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Run slow work outside the actor, and call one of the two callbacks at its end.

        The callbacks also run outside the actor: they may send it messages, but not touch it.
        """

        async def run() -> None:
            try:
                result = await work
            except Exception as error:  # noqa: BLE001 - it becomes a message
                failed(error)
            else:
                done(result)

        task = asyncio.get_running_loop().create_task(run(), name=f"{self.ref.name}: pipe")
        self.ref.pipes.add(task)
        task.add_done_callback(self.ref.pipes.discard)


class ActorRunner(Generic[M]):
    """Runs the actors behind one ref, and replaces an actor that fails.

    `replacement` gets the failure and returns the next actor, or None to end.
    """

    def __init__(
        self, ref: Ref[M], actor: Actor[M], replacement: Callable[[BaseException], Actor[M] | None]
    ) -> None:
        self.ref = ref
        self.actor = actor
        self._replacement = replacement
        self._deferred: set[DeferredReply[Any]] = set()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._begin(self.actor)
        self.task = asyncio.get_running_loop().create_task(self._run(), name=self.ref.name)

    def _begin(self, actor: Actor[M]) -> None:
        self.actor = actor
        actor.ref = self.ref
        actor.on_start()

    def stop(self) -> None:
        """Stop after the waiting messages; later asks get `ActorDead`."""
        last: _Envelope[Any] = _Envelope(None, last=True)
        self.ref._put(last, beyond_limit=True)  # noqa: SLF001 - the runner owns the mailbox

    async def _run(self) -> None:
        ref = self.ref
        try:
            while not self.actor._stopping:  # noqa: SLF001
                if not ref._mail:  # noqa: SLF001
                    ref._wake.clear()  # noqa: SLF001
                    await ref._wake.wait()  # noqa: SLF001
                self._handle_waiting()
                await asyncio.sleep(0)
        finally:
            ref._close()  # noqa: SLF001
            self._fail_deferred()
            self.actor.on_stop()

    def _handle_waiting(self) -> None:
        mail = self.ref._mail  # noqa: SLF001
        for _ in range(min(len(mail), self.actor.messages_per_pass)):
            if self.actor._stopping:  # noqa: SLF001
                return
            self._handle(mail.popleft())

    def _handle(self, envelope: _Envelope[M]) -> None:
        if envelope.last:
            self.actor.stop()
            return
        try:
            answer = self.actor.receive(envelope.message)
        except Exception as error:  # noqa: BLE001 - it goes to the asker or to the supervisor
            if envelope.reply is not None:
                _fail(envelope.reply, error)
            else:
                self._replace_failed(error)
            del envelope  # as in `Ref.ask`
            return
        if envelope.reply is None:
            return
        if isinstance(answer, DeferredReply):
            self._connect(answer, envelope.reply)
        elif not envelope.reply.done():
            envelope.reply.set_result(answer)

    def _connect(self, deferred: DeferredReply[Any], reply: asyncio.Future[Any]) -> None:
        def settle(done: asyncio.Future[Any]) -> None:
            self._deferred.discard(deferred)
            if reply.done():
                done.exception()  # retrieve it, or asyncio logs it as never retrieved
            elif (error := done.exception()) is not None:
                reply.set_exception(error)
            else:
                reply.set_result(done.result())

        self._deferred.add(deferred)
        deferred._future.add_done_callback(settle)  # noqa: SLF001

    def _replace_failed(self, error: BaseException) -> None:
        self._fail_deferred()
        actor = self._replacement(error)
        if actor is None:
            self.actor.stop()
            return
        self._begin(actor)
        actor.on_restart(error)

    def _fail_deferred(self) -> None:
        for deferred in list(self._deferred):
            deferred.fail(ActorDead(f"{self.ref.name} ended before it replied"))


def _fail(reply: asyncio.Future[Any] | None, error: BaseException) -> None:
    if reply is not None and not reply.done():
        reply.set_exception(error)
