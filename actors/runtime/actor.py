"""Actors: one mailbox, one task, one message at a time.

`Ref.tell` puts a message into a bounded mailbox; `Ref.ask` also waits for the answer, and always
ends: with the answer, the handler's exception, `ActorDead` or `AskTimeout`. A failure in an ask
belongs to the asker; a failure in a tell belongs to the supervisor (`actors.runtime.supervision`).

Handlers are plain functions: nobody awaits inside one. Slow work runs beside the actor and comes
back as a message (`Actor.pipe`); an answer that takes time is a `Later`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from protocol.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

M = TypeVar("M")
R = TypeVar("R")


class ActorDead(InternalError):
    """The actor ended before it answered."""


class MailboxFull(InternalError):
    """The actor does not keep up: its mailbox has reached its limit."""


class AskTimeout(InternalError):
    """The actor did not answer in time."""


class Ask(msgspec.Struct, Generic[R], frozen=True):
    """Base of messages that have an answer, of type R."""


class DeferredReply(Generic[R]):
    """An answer that takes time: the handler returns it, keeps it, and answers once.

    Its actor's death ends it with `ActorDead`; answering after that, or again, does nothing.
    """

    def __init__(self) -> None:
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        """Whether it was answered, or nobody waits any more."""
        return self._future.done()

    def answer(self, value: R) -> None:
        """Give the answer."""
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Give an exception as the answer."""
        if not self._future.done():
            self._future.set_exception(error)


@dataclass(frozen=True)
class _Envelope(Generic[M]):
    message: M
    reply: asyncio.Future[Any] | None = None
    last: bool = False
    """No message: the actor ends here."""


class Ref(Generic[M]):
    """An actor's address. It stays valid while a supervisor replaces the actor behind it."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.pipes: set[asyncio.Task[None]] = set()
        """Slow work that runs for the actor."""
        self._mail: deque[_Envelope[M]] = deque()
        self._wake = asyncio.Event()
        self._dead = False

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def alive(self) -> bool:
        """Whether messages are still handled."""
        return not self._dead

    def tell(self, message: M, *, beyond_limit: bool = False) -> None:
        """Send; a dead actor's mail is dropped. Raises `MailboxFull`.

        `beyond_limit` is for the few words that come once and must not be lost.
        """
        if not self._dead:
            self._put(_Envelope(message), beyond_limit=beyond_limit)

    async def ask(self, message: Ask[R], *, timeout_s: float | None = None) -> R:
        """Send and wait for the answer."""
        if self._dead:
            raise ActorDead(f"{self.name} is gone")
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        # That M contains this Ask is the caller's duty: a union cannot be asked for it.
        self._put(_Envelope(message, reply))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise AskTimeout(f"{self.name} did not answer within {timeout_s} s") from None
        finally:
            del reply  # an error in it has this frame: a ring that keeps what was asked for long

    def _put(self, envelope: _Envelope[M], *, beyond_limit: bool = False) -> None:
        if len(self._mail) >= self.limit and not beyond_limit:
            raise MailboxFull(f"{self.name} has {self.limit} messages waiting")
        self._mail.append(envelope)
        self._wake.set()

    def _bury(self) -> None:
        """End the mailbox: whoever waits for an answer gets `ActorDead`."""
        self._dead = True
        for envelope in self._mail:
            _settle(envelope.reply, ActorDead(f"{self.name} ended before it answered"))
        self._mail.clear()
        self._wake.set()


class Actor(ABC, Generic[M]):
    """Base of all actors: give `receive`, and `check` where there is something to check."""

    mailbox_limit = 16_384
    """Above what one read of a socket can turn into messages; it bounds memory, not traffic."""
    turn = 1_000_000
    """The most messages handled before others get their turn; small for those that cause many."""

    ref: Ref[M]
    _stopping = False

    @abstractmethod
    def receive(self, message: M) -> object:
        """Handle a message; what it returns answers an ask."""

    def on_start(self) -> None:
        """Begin; the first thing that a new or restarted actor does."""

    def on_restart(self, error: BaseException) -> None:
        """Begin again in place of an actor that failed with `error`; follows `on_start`."""

    def on_stop(self) -> None:
        """End; also after a failure that is not followed by a restart."""

    def check(self) -> None:
        """Raise AssertionError if what this actor holds contradicts itself."""

    def stop(self) -> None:
        """Handle nothing more after this message."""
        self._stopping = True

    def pipe(
        self,
        work: Coroutine[Any, Any, R],
        done: Callable[[R], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Run slow work beside the actor; its end comes back through one of the two callbacks.

        They run outside of the actor: they may tell it something, and touch nothing of it.
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
    """The life of the actor behind one ref: runs it, and asks its supervisor when it fails.

    `heir` gets the failure and returns the actor that takes over, or None to end.
    """

    def __init__(
        self, ref: Ref[M], actor: Actor[M], heir: Callable[[BaseException], Actor[M] | None]
    ) -> None:
        self.ref = ref
        self.actor = actor
        self._heir = heir
        self._later: set[DeferredReply[Any]] = set()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the first actor at once, and its task."""
        self._begin(self.actor)
        self.task = asyncio.get_running_loop().create_task(self._run(), name=self.ref.name)

    def _begin(self, actor: Actor[M]) -> None:
        self.actor = actor
        actor.ref = self.ref
        actor.on_start()

    def stop(self) -> None:
        """End after the mail that waits now; asks that come later get `ActorDead`."""
        last: _Envelope[Any] = _Envelope(None, last=True)
        self.ref._put(last, beyond_limit=True)  # noqa: SLF001 - a ref is the outside of its cell

    async def _run(self) -> None:
        ref = self.ref
        try:
            while not self.actor._stopping:  # noqa: SLF001
                if not ref._mail:  # noqa: SLF001
                    ref._wake.clear()  # noqa: SLF001
                    await ref._wake.wait()  # noqa: SLF001
                self._turn()
                await asyncio.sleep(0)
        finally:
            ref._bury()  # noqa: SLF001
            self._end_later()
            self.actor.on_stop()

    def _turn(self) -> None:
        mail = self.ref._mail  # noqa: SLF001
        for _ in range(min(len(mail), self.actor.turn)):
            if self.actor._stopping:  # noqa: SLF001
                return
            self._handle(mail.popleft())

    def _handle(self, envelope: _Envelope[M]) -> None:
        if envelope.last:
            self.actor.stop()
            return
        try:
            answer = self.actor.receive(envelope.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody is told
            if envelope.reply is not None:
                _settle(envelope.reply, error)
            else:
                self._fail(error)
            del envelope  # as in `Ref.ask`
            return
        if envelope.reply is None:
            return
        if isinstance(answer, DeferredReply):
            self._forward(answer, envelope.reply)
        elif not envelope.reply.done():
            envelope.reply.set_result(answer)

    def _forward(self, later: DeferredReply[Any], reply: asyncio.Future[Any]) -> None:
        def settle(done: asyncio.Future[Any]) -> None:
            self._later.discard(later)
            if reply.done():
                done.exception()  # read, so that asyncio does not report it as lost
            elif (error := done.exception()) is not None:
                reply.set_exception(error)
            else:
                reply.set_result(done.result())

        self._later.add(later)
        later._future.add_done_callback(settle)  # noqa: SLF001

    def _fail(self, error: BaseException) -> None:
        self._end_later()
        heir = self._heir(error)
        if heir is None:
            self.actor.stop()
            return
        self._begin(heir)
        heir.on_restart(error)

    def _end_later(self) -> None:
        for later in list(self._later):
            later.fail(ActorDead(f"{self.ref.name} ended before it answered"))


def _settle(reply: asyncio.Future[Any] | None, error: BaseException) -> None:
    if reply is not None and not reply.done():
        reply.set_exception(error)
