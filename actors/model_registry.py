"""The supervisor of the models: who has which name, who waits for what, and the end of it all.

Makes a worker for each model, answers loads and unloads when the workers' lifecycles say so, and
runs the shutdown: drain, stop every worker, then tell the system. The supervision of *actors* is
in `actors.runtime.supervision`; that of *processes* in `actors.machines.lifecycle`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from actors import mail
from actors.known_models import KnownModel, KnownModels
from actors.machines import governor_events, lifecycle_events
from actors.runtime.actor import Actor, DeferredReply
from protocol import messages
from protocol import worker as wire
from protocol.errors import (
    Draining,
    InsufficientMemory,
    InternalError,
    InvalidRequest,
    KvdError,
    ModelExists,
    ModelFailed,
    UnknownModel,
    from_info,
)
from protocol.policy import ModelPolicy
from protocol.types import ALIAS_PATTERN, ALIAS_RULE

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.mail import ClientMail, GovernorMail, RegistryMail, RouterMail, WorkerMail
    from actors.runtime.actor import Ref
    from actors.status import StatusTable
    from protocol.errors import ErrorInfo
    from protocol.types import ModelState, ModelStatus


STOPS = "the daemon stops"


@dataclass
class RegistryEntry:
    """One model by its name."""

    name: str
    known: KnownModel
    worker: Ref[WorkerMail]
    state: ModelState = "spawning"
    """As the worker told it last; it is told to start before anything else."""
    served: bool = False
    """It was ready once."""
    leaving: bool = False
    """Unload or shutdown was ordered, or the governor wants its memory."""
    resting: bool = False
    """The governor does: it stays known, and a request brings it back."""
    loaders: list[tuple[DeferredReply[ModelStatus], mail.Watcher | None]] = field(
        default_factory=list
    )
    unloaders: list[DeferredReply[int]] = field(default_factory=list)
    before: KnownModel | None = None
    """The model as it was known before a load that does not wait for room."""
    brought: bool = False
    """Something named it that is known: it stays so if the load fails."""
    askers: list[tuple[DeferredReply[wire.Tokenized], mail.TokensWanted]] = field(
        default_factory=list
    )
    """Texts to tell the tokens of when it is ready."""
    again: list[tuple[DeferredReply[ModelStatus], mail.LoadWanted]] = field(default_factory=list)
    """Loads that came while it was leaving to make room."""


@dataclass
class RegistryState:
    """What outlives a restart of the supervisor, and what it needs."""

    board: StatusTable
    start_worker: Callable[[str, KnownModel], Ref[WorkerMail]]
    """Start a worker actor."""
    stop_worker: Callable[[Ref[WorkerMail]], None]
    """Stop a worker actor."""
    router: Ref[RouterMail]
    governor: Ref[GovernorMail]
    on_empty: Callable[[], None]
    """Called once, when a shutdown has stopped everything."""
    catalogue: KnownModels = field(default_factory=KnownModels)
    seats: dict[str, RegistryEntry] = field(default_factory=dict)
    draining: bool = False
    closing: bool = False
    closed: bool = False
    shutdown_watchers: list[mail.Watcher] = field(default_factory=list)

    def check(self) -> None:
        """Check the invariants."""
        for name, seat in self.seats.items():
            assert seat.name == name, "a seat under another's name"
            assert seat.leaving or not (seat.resting or seat.again), "rests, and does not leave"
            assert not (seat.unloaders and not seat.leaving), "an unload that nobody ordered"
        assert not self.closing or self.draining, "shuts down and takes new work"


class ModelRegistry(Actor["RegistryMail"]):
    """Knows the models by name."""

    def __init__(self, house: RegistryState) -> None:
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
            seat.again.clear()
            seat.askers.clear()

    def receive(self, message: RegistryMail) -> object:  # noqa: C901, PLR0912 - one match, one union
        """Handle a message."""
        match message:
            case mail.LoadWanted():
                return self._load(message)
            case mail.EnsureLoaded(model=model):
                self._ensure(model)
            case mail.EvictRequest(name=name, requeue=requeue):
                self._evict(name, requeue=requeue)
            case mail.PinWanted(name=name, pinned=pinned):
                self._set_policy(name, lambda policy: replace(policy, pinned=pinned))
            case mail.ListWanted():
                return self._list(message)
            case mail.UnlistWanted(name=name):
                self._unlist(name)
            case mail.UnloadRequest(name=name, force=force):
                return self._unload(name, force=force)
            case mail.TokensWanted():
                return self._tokenize(message)
            case mail.TokensUnwanted(client=client):
                self._drop_texts(client)
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

    def _load(self, wanted: mail.LoadWanted) -> DeferredReply[ModelStatus] | ModelStatus:
        """Answer a load.

        0. the name holds what would break a table: ``invalid_request``;
        1. the daemon drains: ``draining``;
        2. the name is free: take a seat, start a worker, wait;
        3. another model has the name: ``model_exists``;
        4. it is being unloaded: ``draining``, come back; if only to make room: load it after that;
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
            seat = self._take_seat(name, self._wanted(name, wanted), patient=False)
        elif not _is_same(seat.known, wanted):  # (3)
            raise _exists(name, seat.known, wanted)
        elif seat.resting:  # (4)
            return self._load_again(seat, wanted)
        elif seat.leaving:  # (4)
            raise Draining(f"{name} is being unloaded; load it again when that is done")
        elif seat.state == "ready":  # (5)
            self._renew(seat, wanted)
            return house.board.model(name)
        else:
            if seat.state == "failed":  # (6)
                self._board(seat.name, seat.known, patient=False)
                seat.worker.tell(mail.Order(lifecycle_events.Start()))
            self._renew(seat, wanted)
        later: DeferredReply[ModelStatus] = DeferredReply()
        seat.loaders.append((later, wanted.watcher))  # (7)
        return later

    def _wanted(self, name: str, wanted: mail.LoadWanted) -> KnownModel:
        before = self._house.catalogue.models.get(name)
        policy = wanted.policy or (before.policy if before is not None else ModelPolicy())
        return KnownModel(wanted.source, wanted.kv, policy, before is not None and before.listed)

    def _take_seat(self, name: str, known: KnownModel, *, patient: bool) -> RegistryEntry:
        house = self._house
        before = None if patient else house.catalogue.models.get(name)
        house.catalogue.models[name] = known
        self._board(name, known, patient=patient)
        worker = house.start_worker(name, known)
        seat = house.seats[name] = RegistryEntry(
            name, known, worker, before=before, brought=patient
        )
        house.router.tell(mail.ModelAdded(name, worker))
        worker.tell(mail.Order(lifecycle_events.Start()))
        return seat

    def _board(self, name: str, known: KnownModel, *, patient: bool) -> None:
        self._govern(governor_events.LoadRequested(name, known.policy, patient))

    def _govern(self, event: governor_events.Event) -> None:
        self._house.governor.tell(mail.Governed(event))

    def _renew(self, seat: RegistryEntry, wanted: mail.LoadWanted) -> None:
        if (told := wanted.policy) is not None:
            self._set_policy(seat.name, lambda _: told)

    def _known(self, name: str) -> KnownModel:
        known = self._house.catalogue.models.get(name)
        if known is None:
            raise UnknownModel(self._missing(name), model=name)
        return known

    def _set_policy(self, name: str, change: Callable[[ModelPolicy], ModelPolicy]) -> None:
        """Let this hold from now on, whether the model is loaded or not, or its load is refused."""
        before = self._known(name)
        known = _with_policy(before, change)
        self._house.catalogue.models[name] = known
        if (seat := self._house.seats.get(name)) is not None:
            seat.known = known
            if seat.before is not None:
                seat.before = _with_policy(seat.before, change)
            if known.policy.weight != before.policy.weight:
                seat.worker.tell(mail.WeightIs(known.policy.weight))
        self._govern(governor_events.PolicyChanged(name, known.policy))

    def _list(self, wanted: mail.ListWanted) -> bool:
        """Take a model as the configuration says; how it is loaded holds while it is loaded."""
        house, name = self._house, wanted.name
        before = house.catalogue.models.get(name)
        if before is None:
            house.catalogue.models[name] = wanted.known
            return True
        as_said = _is_loaded_as(before, wanted.known)
        if not as_said and name not in house.seats:
            policy = replace(before.policy, max_context=wanted.known.policy.max_context)
            house.catalogue.models[name] = dataclasses.replace(wanted.known, policy=policy)
            as_said = True
        if not as_said and not before.listed:
            return False  # somebody loaded another model under this name
        self._set_listed(name, listed=True)
        self._set_policy(name, lambda policy: replace(policy, **wanted.policy))
        return as_said

    def _unlist(self, name: str) -> None:
        if name in self._house.seats:
            self._set_listed(name, listed=False)
        elif name in self._house.catalogue.models:
            self._forget(name)

    def _set_listed(self, name: str, *, listed: bool) -> None:
        seat = self._house.seats.get(name)
        known = dataclasses.replace(self._known(name), listed=listed)
        self._house.catalogue.models[name] = known
        if seat is not None:
            seat.known = known
            if seat.before is not None:
                seat.before = dataclasses.replace(seat.before, listed=listed)

    def _ensure(self, name: str) -> None:
        """Bring a model that a request names, or tell the router that it is not known.

        It knows of all that have a seat.
        """
        house = self._house
        if name in house.seats:
            return
        known = house.catalogue.models.get(name)
        if known is not None and not house.closing:
            self._take_seat(name, known, patient=True)
            return
        error = UnknownModel(f"{self._missing(name)}; load it first", model=name)
        house.router.tell(mail.ModelForgotten(name, error.info()))

    def _tokenize(self, wanted: mail.TokensWanted) -> DeferredReply[wire.Tokenized]:
        """Have a model's process tell a text's tokens, when it runs."""
        name, house = wanted.name, self._house
        known = self._known(name)
        if house.draining:
            raise Draining("the daemon takes no new work")
        seat = house.seats.get(name) or self._take_seat(name, known, patient=True)
        if seat.leaving:
            raise Draining(f"{name} is being unloaded; ask again when that is done")
        if seat.state == "failed":
            error = house.board.model(name).error
            raise from_info(error) if error else ModelFailed(f"{name} was given up", model=name)
        later: DeferredReply[wire.Tokenized] = DeferredReply()
        seat.askers.append((later, wanted))
        if seat.state == "ready":
            self._ask_tokens(seat)
        return later

    def _ask_tokens(self, seat: RegistryEntry) -> None:
        askers, seat.askers = seat.askers, []
        for later, wanted in askers:
            self.pipe(seat.worker.ask(mail.TokensAsked(wanted.command)), later.answer, later.fail)

    def _drop_texts(self, client: Ref[ClientMail]) -> None:
        for seat in self._house.seats.values():
            gone = [later for later, wanted in seat.askers if wanted.client is client]
            seat.askers = [asker for asker in seat.askers if asker[1].client is not client]
            for later in gone:
                later.fail(InternalError("nobody waits for this text"))

    def _missing(self, name: str) -> str:
        names = ", ".join(sorted(self._house.seats)) or "none"
        return f"no model {name!r} is loaded (loaded: {names})"

    def _unload(self, name: str, *, force: bool) -> DeferredReply[int] | int:
        seat = self._house.seats.get(name)
        if seat is None:
            self._known(name)
            self._forget(name)  # it made room before; now no request brings it back
            return 0
        later: DeferredReply[int] = DeferredReply()
        seat.unloaders.append(later)
        self._dismiss(seat, force=force)
        return later

    def _evict(self, name: str, *, requeue: bool) -> None:
        """Unload a model to make room: what it can finish at once it finishes, the rest waits."""
        house = self._house
        seat = house.seats.get(name)
        if seat is None or (seat.leaving and not (seat.resting and requeue)):
            return
        seat.leaving = seat.resting = True
        gone = InsufficientMemory(f"{name} gave its memory to a request that had waited for longer")
        self._fail_loaders(seat, gone)
        house.router.tell(mail.ModelRests(name))
        drains = seat.state == "ready" and not requeue
        seat.worker.tell(
            mail.Order(lifecycle_events.Drain() if drains else lifecycle_events.Halt())
        )

    def _load_again(
        self, seat: RegistryEntry, wanted: mail.LoadWanted
    ) -> DeferredReply[ModelStatus]:
        later: DeferredReply[ModelStatus] = DeferredReply()
        seat.again.append((later, wanted))
        return later

    def _dismiss(self, seat: RegistryEntry, *, force: bool) -> None:
        seat.leaving, seat.resting = True, False
        for later, _ in seat.again:
            later.fail(Draining(f"{seat.name} was unloaded while it loaded"))
        seat.again.clear()
        self._govern(governor_events.UnloadStarted(seat.name))
        reason = STOPS if self._house.closing else ""
        self._fail_loaders(seat, Draining(reason or f"{seat.name} was unloaded while it loaded"))
        seat.worker.tell(
            mail.Order(lifecycle_events.Halt(reason) if force else lifecycle_events.Drain())
        )

    def _leave(
        self, seat: RegistryEntry, *, freed_bytes: int, error: ErrorInfo | None = None
    ) -> None:
        house = self._house
        del house.seats[seat.name]
        house.stop_worker(seat.worker)
        house.board.models.pop(seat.name, None)
        if seat.resting:
            house.router.tell(mail.ModelAsleep(seat.name))
        else:
            house.router.tell(mail.ModelForgotten(seat.name, error))
            stays = seat.known.listed or seat.brought
            self._forget(seat.name, keep=stays and not seat.unloaders)
        for unloader in seat.unloaders:
            unloader.answer(freed_bytes)
        if seat.again:
            told = [wanted.policy for _, wanted in seat.again if wanted.policy is not None]
            known = dataclasses.replace(seat.known, policy=told[-1]) if told else seat.known
            after = self._take_seat(seat.name, known, patient=False)
            after.loaders = [(later, wanted.watcher) for later, wanted in seat.again]
        self._end_if_empty()

    def _forget(self, name: str, *, keep: bool = False) -> None:
        if not keep:
            self._house.catalogue.models.pop(name, None)
        self._govern(governor_events.ModelRemoved(name))

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
                self._ask_tokens(seat)
            case "failed" if news.error is not None:
                self._fail_loaders(seat, from_info(news.error))
                if news.refused:
                    self._refused(seat, news.error, freed_bytes=news.freed_bytes)
            case "backoff" if news.error is not None and news.error.code == InsufficientMemory.code:
                self._fail_loaders(seat, from_info(news.error))  # nobody knows when it comes back
            case "stopped" if seat.leaving:
                self._leave(seat, freed_bytes=news.freed_bytes)
            case _:
                pass

    def _refused(self, seat: RegistryEntry, error: ErrorInfo, *, freed_bytes: int) -> None:
        """Leave all as if nobody had asked; a model that ran before stays, to say why it is gone.

        A model that was known is so again, from where it was, and requests wait on that came
        meanwhile: they bring it when there is room, as if they had come first. Not so where an
        unload was ordered, of which the worker had not heard yet.
        """
        if seat.served:
            self._house.router.tell(mail.ModelChanged(seat.name, "failed", error))
            return
        ordered = seat.leaving and not seat.resting
        seat.resting = seat.before is not None and not ordered
        if seat.before is not None:
            self._house.catalogue.models[seat.name] = seat.before
        self._leave(seat, freed_bytes=freed_bytes, error=error)

    def _progressed(self, news: mail.LoadProgressed) -> None:
        seat = self._house.seats.get(news.name)
        for _, watcher in seat.loaders if seat is not None else []:
            if watcher is not None:
                event = messages.Loading(
                    id=watcher.id, model=news.name, stage=news.stage, fraction=news.fraction
                )
                watcher.client.tell(mail.Deliver(event))

    def _answer_loaders(self, seat: RegistryEntry) -> None:
        loaders, seat.loaders = seat.loaders, []
        for later, _ in loaders:
            later.answer(self._house.board.model(seat.name))

    def _fail_loaders(self, seat: RegistryEntry, error: KvdError) -> None:
        loaders, seat.loaders = seat.loaders, []
        askers, seat.askers = seat.askers, []
        for loader, _ in loaders:
            loader.fail(error)
        for asker, _ in askers:
            asker.fail(error)

    # -- the end ----------------------------------------------------------------------------------

    def _drain(self) -> DeferredReply[None]:
        later: DeferredReply[None] = DeferredReply()
        self._house.draining = True
        self.pipe(self._house.router.ask(mail.FinishAll()), later.answer, later.fail)
        return later

    def _shut_down(self, watcher: mail.Watcher | None, *, force: bool) -> None:
        house = self._house
        house.draining = True
        if watcher is not None:
            house.shutdown_watchers.append(watcher)
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
        for watcher in house.shutdown_watchers:
            watcher.client.tell(mail.Deliver(messages.ShutdownReply(id=watcher.id)))
        house.on_empty()


def short_name(source: str) -> str:
    """Return the name that a model gets without an alias: the last part of where it comes from."""
    return source.rstrip("/").rpartition("/")[2] or source


def _with_policy(known: KnownModel, change: Callable[[ModelPolicy], ModelPolicy]) -> KnownModel:
    return dataclasses.replace(known, policy=change(known.policy))


def _is_loaded_as(known: KnownModel, wanted: KnownModel) -> bool:
    same_context = known.policy.max_context == wanted.policy.max_context
    return (known.source, known.kv) == (wanted.source, wanted.kv) and same_context


def _is_same(known: KnownModel, wanted: mail.LoadWanted) -> bool:
    context = known.policy.max_context
    same_context = wanted.policy is None or wanted.policy.max_context == context
    return (known.source, known.kv) == (wanted.source, wanted.kv) and same_context


def _exists(name: str, known: KnownModel, wanted: mail.LoadWanted) -> ModelExists:
    other = ""
    if known.source == wanted.source and known.kv.name == wanted.kv.name:
        other = " and another max_context" if known.kv == wanted.kv else " and other KV settings"
    return ModelExists(
        f"{name} is loaded from {known.source} with {known.kv.name}{other}; "
        "unload it first, or load under another alias",
        model=name,
    )


def _check_name(name: str, wanted: mail.LoadWanted) -> None:
    if re.search(ALIAS_PATTERN, name):
        return
    if wanted.alias is not None:
        raise InvalidRequest(f"alias {ALIAS_RULE}", field="alias")
    raise InvalidRequest(
        f"{name!r} cannot be a model's name: it {ALIAS_RULE}; load it under an alias",
        field="alias",
    )
