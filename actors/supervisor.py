"""The supervisor of the models: who has which name, who waits for what, and the end of it all.

Makes a worker for each model, answers loads and unloads when the workers' lifecycles say so, and
runs the shutdown: drain, stop every worker, then tell the system. The supervision of *actors* is
in `actors.runtime.supervision`; that of *processes* in `actors.machines.lifecycle`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.machines import lifecycle
from actors.runtime.actor import Actor, Later
from protocol import messages
from protocol.errors import (
    Draining,
    InsufficientMemory,
    InvalidRequest,
    KvdError,
    ModelExists,
    UnknownModel,
    from_info,
)
from protocol.types import ALIAS_PATTERN, ALIAS_RULE

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.board import Board
    from actors.mail import RouterMail, SupervisorMail, WorkerMail
    from actors.runtime.actor import Ref
    from protocol.types import KVSpec, ModelState, ModelStatus


STOPS = "the daemon stops"


@dataclass
class Seat:
    """One model by its name."""

    name: str
    source: str
    kv: KVSpec
    worker: Ref[WorkerMail]
    state: ModelState = "spawning"
    """As the worker told it last; it is told to start before anything else."""
    served: bool = False
    """It was ready once."""
    leaving: bool = False
    """Unload or shutdown was ordered."""
    loaders: list[tuple[Later[ModelStatus], mail.Watcher | None]] = field(default_factory=list)
    unloaders: list[Later[int]] = field(default_factory=list)


@dataclass
class House:
    """What outlives a restart of the supervisor, and what it needs."""

    board: Board
    hire: Callable[[str, str, KVSpec], Ref[WorkerMail]]
    """Start a worker actor: name, source, kv."""
    dismiss: Callable[[Ref[WorkerMail]], None]
    """Stop a worker actor."""
    router: Ref[RouterMail]
    on_empty: Callable[[], None]
    """Called once, when a shutdown has stopped everything."""
    seats: dict[str, Seat] = field(default_factory=dict)
    draining: bool = False
    closing: bool = False
    closed: bool = False
    farewells: list[mail.Watcher] = field(default_factory=list)

    def check(self) -> None:
        """Check the invariants."""
        for name, seat in self.seats.items():
            assert seat.name == name, "a seat under another's name"
            assert not (seat.unloaders and not seat.leaving), "an unload that nobody ordered"
        assert not self.closing or self.draining, "shuts down and takes new work"


class Supervisor(Actor["SupervisorMail"]):
    """Knows the models by name."""

    def __init__(self, house: House) -> None:
        house.check()
        self._house = house

    def check(self) -> None:
        """Check the invariants."""
        self._house.check()

    def on_restart(self, error: BaseException) -> None:  # noqa: ARG002 - the reason is logged
        """Forget who waited: they were told that we died."""
        for seat in self._house.seats.values():
            seat.loaders.clear()
            seat.unloaders.clear()

    def receive(self, message: SupervisorMail) -> object:
        """Handle a message."""
        match message:
            case mail.LoadWanted():
                return self._load(message)
            case mail.EnsureLoaded(model=model):
                self._ensure(model)
            case mail.UnloadWanted(name=name, force=force):
                return self._unload(name, force=force)
            case mail.DrainWanted():
                return self._drain()
            case mail.ShutdownWanted(force=force, watcher=watcher):
                self._shut_down(watcher, force=force)
            case mail.NothingRuns():
                self._close(force=False)
            case mail.WorkerChanged():
                self._changed(message)
            case mail.LoadProgressed():
                self._progressed(message)
            case _:
                assert_never(message)
        return None

    # -- load and unload --------------------------------------------------------------------------

    def _load(self, wanted: mail.LoadWanted) -> Later[ModelStatus] | ModelStatus:
        """Answer a load.

        0. the name holds what would break a table: ``invalid_request``;
        1. the daemon drains: ``draining``;
        2. the name is free: take a seat, start a worker, wait;
        3. another model has the name: ``model_exists``;
        4. it is being unloaded: ``draining``, come back;
        5. it is ready: answer at once;
        6. it was given up: start afresh and wait;
        7. it loads or comes back: wait with the others.
        """
        house = self._house
        name = wanted.alias or short_name(wanted.source)
        _check_name(name, wanted)  # (0)
        if house.draining:  # (1)
            raise Draining("the daemon takes no new work")
        seat = house.seats.get(name)
        if seat is None:  # (2)
            seat = self._take_seat(name, wanted)
        elif (seat.source, seat.kv) != (wanted.source, wanted.kv):  # (3)
            same = seat.kv.name == wanted.kv.name and seat.source == wanted.source
            raise ModelExists(
                f"{name} is loaded from {seat.source} with {seat.kv.name}"
                f"{' and other KV settings' if same else ''}; "
                "unload it first, or load under another alias",
                model=name,
            )
        elif seat.leaving:  # (4)
            raise Draining(f"{name} is being unloaded; load it again when that is done")
        elif seat.state == "ready":  # (5)
            return house.board.model(name)
        elif seat.state == "failed":  # (6)
            seat.worker.tell(mail.Order(lifecycle.Start()))
        later: Later[ModelStatus] = Later()
        seat.loaders.append((later, wanted.watcher))  # (7)
        return later

    def _take_seat(self, name: str, wanted: mail.LoadWanted) -> Seat:
        house = self._house
        worker = house.hire(name, wanted.source, wanted.kv)
        seat = house.seats[name] = Seat(name, wanted.source, wanted.kv, worker)
        house.router.tell(mail.ModelAdded(name, worker))
        worker.tell(mail.Order(lifecycle.Start()))
        return seat

    def _ensure(self, name: str) -> None:
        """Tell the router of a model that it does not know; it knows all that have a seat."""
        if name not in self._house.seats:
            error = UnknownModel(f"{self._missing(name)}; load it first", model=name)
            self._house.router.tell(mail.ModelForgotten(name, error.info()))

    def _missing(self, name: str) -> str:
        names = ", ".join(sorted(self._house.seats)) or "none"
        return f"no model {name!r} is loaded (loaded: {names})"

    def _unload(self, name: str, *, force: bool) -> Later[int]:
        seat = self._house.seats.get(name)
        if seat is None:
            raise UnknownModel(self._missing(name), model=name)
        later: Later[int] = Later()
        seat.unloaders.append(later)
        self._dismiss(seat, force=force)
        return later

    def _dismiss(self, seat: Seat, *, force: bool) -> None:
        seat.leaving = True
        reason = STOPS if self._house.closing else ""
        self._fail_loaders(seat, Draining(reason or f"{seat.name} was unloaded while it loaded"))
        seat.worker.tell(mail.Order(lifecycle.Halt(reason) if force else lifecycle.Drain()))

    def _leave(self, seat: Seat, *, freed_bytes: int) -> None:
        house = self._house
        del house.seats[seat.name]
        house.router.tell(mail.ModelForgotten(seat.name))
        house.dismiss(seat.worker)
        house.board.models.pop(seat.name, None)
        for later in seat.unloaders:
            later.answer(freed_bytes)
        self._end_if_empty()

    # -- news of workers --------------------------------------------------------------------------

    def _changed(self, news: mail.WorkerChanged) -> None:
        seat = self._house.seats.get(news.name)
        if seat is None:
            return
        seat.state = news.state
        match news.state:
            case "ready":
                seat.served = True
                self._answer_loaders(seat)
            case "failed" if news.error is not None:
                self._fail_loaders(seat, from_info(news.error))
                if news.refused and not seat.served:  # it is as if nobody had asked
                    self._leave(seat, freed_bytes=news.freed_bytes)
            case "backoff" if news.error is not None and news.error.code == InsufficientMemory.code:
                self._fail_loaders(seat, from_info(news.error))  # nobody knows when it comes back
            case "stopped" if seat.leaving:
                self._leave(seat, freed_bytes=news.freed_bytes)
            case _:
                pass

    def _progressed(self, news: mail.LoadProgressed) -> None:
        seat = self._house.seats.get(news.name)
        for _, watcher in seat.loaders if seat is not None else []:
            if watcher is not None:
                event = messages.Loading(
                    id=watcher.id, model=news.name, stage=news.stage, fraction=news.fraction
                )
                watcher.client.tell(mail.Deliver(event))

    def _answer_loaders(self, seat: Seat) -> None:
        loaders, seat.loaders = seat.loaders, []
        for later, _ in loaders:
            later.answer(self._house.board.model(seat.name))

    def _fail_loaders(self, seat: Seat, error: KvdError) -> None:
        loaders, seat.loaders = seat.loaders, []
        for later, _ in loaders:
            later.fail(error)

    # -- the end ----------------------------------------------------------------------------------

    def _drain(self) -> Later[None]:
        later: Later[None] = Later()
        self._house.draining = True
        self.pipe(self._house.router.ask(mail.FinishAll()), later.answer, later.fail)
        return later

    def _shut_down(self, watcher: mail.Watcher | None, *, force: bool) -> None:
        house = self._house
        house.draining = True
        if watcher is not None:
            house.farewells.append(watcher)
        if force:
            # So that the router, too, knows why what waits there ends.
            self.pipe(house.router.ask(mail.FinishAll()), lambda _: None, lambda _: None)
            self._close(force=True)
            return
        ref = self.ref
        self.pipe(
            house.router.ask(mail.FinishAll()),
            lambda _: ref.tell(mail.NothingRuns()),
            lambda _: ref.tell(mail.NothingRuns()),
        )

    def _close(self, *, force: bool) -> None:
        self._house.closing = True
        for seat in list(self._house.seats.values()):
            self._dismiss(seat, force=force)
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        house = self._house
        if not house.closing or house.seats or house.closed:
            return
        house.closed = True
        for watcher in house.farewells:
            watcher.client.tell(mail.Deliver(messages.Bye(id=watcher.id)))
        house.on_empty()


def short_name(source: str) -> str:
    """Return the name that a model gets without an alias: the last part of where it comes from."""
    return source.rstrip("/").rpartition("/")[2] or source


def _check_name(name: str, wanted: mail.LoadWanted) -> None:
    if re.search(ALIAS_PATTERN, name):
        return
    if wanted.alias is not None:
        raise InvalidRequest(f"alias {ALIAS_RULE}", field="alias")
    raise InvalidRequest(
        f"{name!r} cannot be a model's name: it {ALIAS_RULE}; load it under an alias",
        field="alias",
    )
