"""The model registry: loaded models by name, the replies due for each, and the shutdown.

The shutdown drains, stops every worker, then notifies the system.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import assert_never

from msgspec.structs import replace

from actors import mail
from actors.machines import admission_events, governor_events, lifecycle_events
from actors.registry_state import (
    AT_LOAD,
    RegistryEntry,
    RegistryState,
    check_name,
    is_loaded_as,
    model_exists,
)
from actors.runtime.actor import Actor, DeferredReply, Ref
from actors.status import KnownModel
from protocol import errors, messages
from protocol import worker as wire
from protocol.model_source import short_name
from protocol.policy import ModelPolicy
from protocol.types import ModelStatus


class ModelRegistry(Actor[mail.RegistryMail]):
    """Owns the workers by model name."""

    def __init__(self, state: RegistryState) -> None:
        state.check()
        self._state = state
        self._known_models = state.statuses.known

    def check(self) -> None:
        self._state.check()

    def on_restart(self, error: BaseException) -> None:  # noqa: ARG002 - the reason is logged
        """Forget the replies that are due: their askers got `ActorDead`."""
        for entry in self._state.entries.values():
            entry.load_replies.clear()
            entry.unload_replies.clear()
            entry.reloads.clear()
            entry.texts.clear()

    def receive(self, message: mail.RegistryMail) -> object:  # noqa: C901, PLR0912 - one match
        match message:
            case mail.LoadModel():
                return self._load(message)
            case mail.EnsureLoaded(model=model):
                self._ensure_loaded(model)
            case mail.EvictModel(name=name, requeue=requeue):
                self._evict(name, requeue=requeue)
            case mail.EndWorker(name=name, order=order):
                if (entry := self._state.entries.get(name)) is not None:
                    entry.worker.tell(mail.LifecycleEvent(order))
            case mail.KeepLoaded(name=name, seconds=seconds):
                self._keep_loaded(name, seconds)
            case mail.SetPolicy(name=name, fields=fields):
                self._set_policy(name, lambda policy: replace(policy, **fields))
            case mail.AddConfiguredModel():
                return self._add_configured(message)
            case mail.SetFoundModels(sources=sources):
                self._state.set_found(sources)
            case mail.RemoveConfiguredModel(name=name):
                self._remove_configured(name)
            case mail.UnloadModel(name=name, force=force):
                return self._unload(name, force=force)
            case mail.TokenizeText():
                return self._tokenize(message)
            case mail.CancelTokenize(client=client):
                self._cancel_texts(client)
            case mail.Drain():
                return self._drain()
            case mail.Shutdown(force=force, watcher=watcher):
                self._shut_down(watcher, force=force)
            case mail.RequestsDrained():
                self._close(force=False)
            case mail.WorkerChanged():
                self._on_worker_changed(message)
            case mail.LoadProgressed():
                self._on_progress(message)
            case _:
                assert_never(message)
        return None

    # -- load -------------------------------------------------------------------------------------

    def _load(self, load: mail.LoadModel) -> DeferredReply[ModelStatus] | ModelStatus:
        """Return the status of a ready model; otherwise load it, and answer when it is ready."""
        state = self._state
        load = state.named(load)
        name = load.alias or short_name(load.source)
        check_name(name, load)
        wanted = state.wanted(name, load)
        if state.draining:
            raise errors.Draining("the daemon takes no new work")
        entry = state.entries.get(name)
        if entry is None:
            entry = self._add(name, wanted, patient=False)
        elif not is_loaded_as(entry.known, wanted):
            raise model_exists(name, entry.known, wanted)
        elif entry.evicted:  # it is loaded again after the eviction
            reload: DeferredReply[ModelStatus] = DeferredReply()
            entry.reloads.append((reload, load))
            return reload
        elif entry.leaving:
            raise errors.Draining(f"{name} is being unloaded; load it again when that is done")
        else:
            if entry.state == "failed":  # its worker was given up
                if entry.requested and entry.before is None:
                    entry.before = entry.known  # requests that wait do not end if this is refused
                self._announce_load(entry.name, entry.policy, patient=False)
                entry.worker.tell(mail.LifecycleEvent(lifecycle_events.Start()))
            if load.policy.fields:
                self._set_policy(name, load.policy.applied_to)
            if entry.state == "ready":
                return state.statuses.model(name)
        reply: DeferredReply[ModelStatus] = DeferredReply()
        entry.load_replies.append((reply, load.watcher))
        return reply

    def _add(self, name: str, known: KnownModel, *, patient: bool) -> RegistryEntry:
        """Add an entry and start its worker; ``patient``: the load waits until memory is free.

        Raises `UnsupportedModel` if this machine does not have the model's devices.
        """
        state = self._state
        if (error := state.statuses.missing_device(name, known.policy)) is not None:
            raise error
        before = None if patient else self._known_models.get(name)
        self._known_models[name] = known
        self._announce_load(name, known.policy, patient=patient)
        worker = state.start_worker(name, known)
        entry = RegistryEntry(name, known, worker, before=before, requested=patient)
        state.entries[name] = entry
        state.router.tell(mail.ModelAdded(name, worker))
        worker.tell(mail.LifecycleEvent(lifecycle_events.Start()))
        return entry

    def _announce_load(self, name: str, policy: ModelPolicy, *, patient: bool) -> None:
        self._tell_governor(governor_events.LoadRequested(name, policy, patient))

    def _tell_governor(self, event: governor_events.Event) -> None:
        self._state.governor.tell(mail.GovernorEvent(event))

    def _tell_router(self, event: admission_events.Event) -> None:
        self._state.router.tell(mail.AdmissionEvent(event))

    def _ensure_loaded(self, name: str) -> None:
        """Load the model that a request names.

        If that is not possible, or the daemon stops, end the requests that wait for it.
        """
        state = self._state
        if name in state.entries:
            return  # the router knows the model already
        error: errors.ModelError | None = None
        try:
            known = self._known(name)
            if not state.closing:
                self._add(name, known, patient=True)
                return
        except errors.ModelError as refused:
            error = refused
        self._tell_router(admission_events.ModelRemoved(name, error.info() if error else None))

    # -- policy and configuration -----------------------------------------------------------------

    def _known(self, name: str) -> KnownModel:
        known = self._state.statuses.lookup(name)
        if known is None:
            raise self._state.statuses.unknown_model(name)
        return known

    def _set_policy(self, name: str, change: Callable[[ModelPolicy], ModelPolicy]) -> None:
        weight = self._known(name).policy.weight
        policy = self._change_known(
            name, lambda known: dataclasses.replace(known, policy=change(known.policy))
        ).policy
        if (entry := self._state.entries.get(name)) is None:
            self._tell_governor(governor_events.PolicyChanged(name, policy))
            return
        if policy.weight != weight:
            entry.worker.tell(mail.SetWeight(policy.weight))
        self._tell_governor(governor_events.PolicyChanged(name, entry.policy))

    def _keep_loaded(self, name: str, seconds: float) -> None:
        if (entry := self._state.entries.get(name)) is not None:
            entry.keep_alive_s = seconds
            changed = governor_events.PolicyChanged(name, entry.policy, by_request=True)
            self._tell_governor(changed)

    def _change_known(self, name: str, change: Callable[[KnownModel], KnownModel]) -> KnownModel:
        """Change how a model is known, and how it will be known if its current load is refused."""
        known = self._known_models[name] = change(self._known(name))
        if (entry := self._state.entries.get(name)) is not None:
            entry.known = known
            if entry.before is not None:
                entry.before = change(entry.before)
        return known

    def _add_configured(self, message: mail.AddConfiguredModel) -> bool:
        state, name = self._state, message.name
        before = self._known_models.get(name)
        if before is None:
            self._known_models[name] = message.known
            return True
        in_force = is_loaded_as(before, message.known)
        if not in_force and name not in state.entries:
            at_load = {field: getattr(message.known.policy, field) for field in AT_LOAD}
            policy = replace(before.policy, **at_load)
            self._known_models[name] = dataclasses.replace(message.known, policy=policy)
            in_force = True
        if not in_force and not before.listed:
            return False  # a client loaded another model under this name
        self._change_known(name, lambda known: dataclasses.replace(known, listed=True))
        self._set_policy(name, lambda policy: replace(policy, **message.policy))
        return in_force

    def _remove_configured(self, name: str) -> None:
        if name in self._state.entries:
            self._change_known(name, lambda known: dataclasses.replace(known, listed=False))
        elif name in self._known_models:
            self._forget(name)

    # -- tokenize ---------------------------------------------------------------------------------

    def _tokenize(self, message: mail.TokenizeText) -> DeferredReply[wire.Tokenized]:
        name, state = message.name, self._state
        known = self._known(name)
        if state.draining:
            raise errors.Draining("the daemon takes no new work")
        entry = state.entries.get(name) or self._add(name, known, patient=True)
        if entry.leaving and not entry.evicted:
            raise errors.Draining(f"{name} is being unloaded; ask again when that is done")
        if entry.state == "failed":
            error = state.statuses.model(name).error
            if error is None:
                raise errors.ModelFailed(f"{name} was given up", model=name)
            raise errors.from_info(error)
        reply: DeferredReply[wire.Tokenized] = DeferredReply()
        entry.texts.append((reply, message))
        if entry.state == "ready":
            self._send_texts(entry)
        return reply

    def _send_texts(self, entry: RegistryEntry) -> None:
        """Send the waiting texts to the worker; those of an evicted model wait for its reload."""
        if entry.leaving:
            return
        texts, entry.texts = entry.texts, []
        for reply, message in texts:
            self.pipe(entry.worker.ask(mail.Tokenize(message.command)), reply.answer, reply.fail)

    def _cancel_texts(self, client: Ref[mail.ClientMail]) -> None:
        for entry in self._state.entries.values():
            cancelled = [reply for reply, text in entry.texts if text.client is client]
            entry.texts = [text for text in entry.texts if text[1].client is not client]
            for reply in cancelled:
                reply.fail(errors.InternalError("the client that sent this text disconnected"))

    # -- unload -----------------------------------------------------------------------------------

    def _unload(self, name: str, *, force: bool) -> DeferredReply[int] | int:
        entry = self._state.entries.get(name)
        if entry is None:
            # It was evicted before. Now requests load it only if it stays known.
            self._forget(name, keep=self._known(name).stays)
            return 0
        reply: DeferredReply[int] = DeferredReply()
        entry.unload_replies.append(reply)
        self._start_unload(entry, force=force)
        return reply

    def _evict(self, name: str, *, requeue: bool) -> None:
        state = self._state
        entry = state.entries.get(name)
        if entry is None or (entry.leaving and not (entry.evicted and requeue)):
            return
        entry.leaving = entry.evicted = True
        reason = f"{name} was evicted for a request that had waited longer"
        entry.fail_loads(errors.InsufficientMemory(reason))
        self._tell_router(admission_events.ModelEvicting(name))
        drains = entry.state == "ready" and not requeue
        drain = lifecycle_events.Drain(write_s=lifecycle_events.EVICT_WRITE_S)
        order = drain if drains else lifecycle_events.Halt()
        entry.worker.tell(mail.LifecycleEvent(order))

    def _start_unload(self, entry: RegistryEntry, *, force: bool) -> None:
        entry.leaving, entry.evicted = True, False
        unloaded = f"{entry.name} was unloaded while it loaded"
        for reply, _ in entry.reloads:
            reply.fail(errors.Draining(unloaded))
        entry.reloads.clear()
        self._tell_governor(governor_events.UnloadStarted(entry.name))
        reason = "the daemon stops" if self._state.closing else ""
        entry.fail_replies(errors.Draining(reason or unloaded))
        order = lifecycle_events.Halt(reason) if force else lifecycle_events.Drain()
        entry.worker.tell(mail.LifecycleEvent(order))

    def _remove(
        self, entry: RegistryEntry, *, freed_bytes: int, error: errors.ErrorInfo | None = None
    ) -> None:
        state = self._state
        del state.entries[entry.name]
        state.stop_worker(entry.worker)
        state.statuses.models.pop(entry.name, None)
        if entry.evicted:
            self._tell_router(admission_events.ModelEvicted(entry.name))
        else:
            self._tell_router(admission_events.ModelRemoved(entry.name, error))
            by_client = bool(entry.unload_replies)
            if by_client and entry.before is not None:
                self._known_models[entry.name] = entry.before
            keep = entry.known.stays or (entry.requested and not by_client)
            self._forget(entry.name, keep=keep)
        for reply in entry.unload_replies:
            reply.answer(freed_bytes)
        if entry.reloads or entry.texts:
            self._reload(entry)
        self._finish_if_empty()

    def _reload(self, entry: RegistryEntry) -> None:
        known = self._known_models[entry.name]
        for _, load in entry.reloads:
            known = dataclasses.replace(known, policy=load.policy.applied_to(known.policy))
        try:
            added = self._add(entry.name, known, patient=not entry.reloads)
        except errors.UnsupportedModel as error:
            for reply, _ in entry.reloads:
                reply.fail(error)
            entry.fail_texts(error)
            return
        added.load_replies = [(reply, load.watcher) for reply, load in entry.reloads]
        added.texts = entry.texts

    def _forget(self, name: str, *, keep: bool = False) -> None:
        """Tell the governor that a model is gone, and unless ``keep`` also forget its name."""
        if not keep:
            self._known_models.pop(name, None)
        self._tell_governor(governor_events.ModelRemoved(name))

    # -- workers ----------------------------------------------------------------------------------

    def _on_worker_changed(self, change: mail.WorkerChanged) -> None:
        entry = self._state.entries.get(change.name)
        if entry is None:
            return
        entry.state = change.state
        match change.state:
            case "ready":
                entry.served = True
                replies, entry.load_replies = entry.load_replies, []
                for reply, _ in replies:
                    reply.answer(self._state.statuses.model(entry.name))
                self._send_texts(entry)
            case "failed" if change.error is not None and change.refused:
                self._on_refused(entry, change.error, change.freed_bytes)
            case "failed" if change.error is not None:
                entry.fail_replies(errors.from_info(change.error))
            case "backoff" if change.error and change.error.code == errors.InsufficientMemory.code:
                # Do not let the replies wait: the memory may never become free.
                entry.fail_replies(errors.from_info(change.error))
            case "stopped" if entry.leaving:
                self._remove(entry, freed_bytes=change.freed_bytes)
            case _:
                pass

    def _on_refused(self, entry: RegistryEntry, error: errors.ErrorInfo, freed_bytes: int) -> None:
        """Undo a refused load.

        A model that was ready before keeps its entry, whose error shows why it does not run. A
        model that was known before the load is known as before, and requests and texts that
        arrived during the load cause another load, which waits for memory. If an unload was
        ordered too late to reach the worker, they end instead.
        """
        entry.fail_loads(errors.from_info(error))
        if entry.served:
            entry.fail_texts(errors.from_info(error))
            self._tell_router(admission_events.ModelChanged(entry.name, "failed", error))
            return
        unloading = entry.leaving and not entry.evicted
        entry.evicted = entry.before is not None and not unloading
        if not entry.evicted:
            entry.fail_texts(errors.from_info(error))
        if entry.before is not None:
            self._known_models[entry.name] = entry.before
        self._remove(entry, freed_bytes=freed_bytes, error=error)

    def _on_progress(self, progress: mail.LoadProgressed) -> None:
        entry = self._state.entries.get(progress.name)
        for _, watcher in entry.load_replies if entry is not None else []:
            if watcher is not None:
                event = messages.Loading(
                    id=watcher.id,
                    model=progress.name,
                    stage=progress.stage,
                    fraction=progress.fraction,
                )
                watcher.client.tell(mail.Deliver(event))

    # -- shutdown ---------------------------------------------------------------------------------

    def _drain(self) -> DeferredReply[None]:
        reply: DeferredReply[None] = DeferredReply()
        self._state.draining = True
        self.pipe(self._state.router.ask(mail.FinishAll()), reply.answer, reply.fail)
        return reply

    def _shut_down(self, watcher: mail.Watcher | None, *, force: bool) -> None:
        state = self._state
        state.draining = True
        if watcher is not None:
            state.shutdown_watchers.append(watcher)
        if force:
            # The router must know why requests end before the first of them does. An `ask` would
            # reach it later than the events that follow here.
            self._tell_router(admission_events.DrainStarted())
            self._close(force=True)
            return
        ref = self.ref

        def finished(_: object) -> None:
            ref.tell(mail.RequestsDrained())

        self.pipe(state.router.ask(mail.FinishAll()), finished, finished)

    def _close(self, *, force: bool) -> None:
        self._state.closing = True
        for entry in list(self._state.entries.values()):
            self._start_unload(entry, force=force)
        self._finish_if_empty()

    def _finish_if_empty(self) -> None:
        state = self._state
        if not state.closing or state.entries or state.closed:
            return
        state.closed = True
        for watcher in state.shutdown_watchers:
            watcher.client.tell(mail.Deliver(messages.ShutdownReply(id=watcher.id)))
        state.on_empty()
