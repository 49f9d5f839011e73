"""Assigns requests to workers, and decides what happens to them when a worker ends. Pure.

A request waits while its model loads or restarts, and goes to the worker as soon as the model is
ready. The worker's own scheduler decides about rows. Each request ends exactly once: in its worker,
or here by `FailRequest` or `ConfirmCancel`. Knows request ids only, no prompts and no clients.

The first rule that applies to an arriving request decides:

1. The daemon drains, or the model is being unloaded: ``draining``.
2. The model was given up: the model's own error.
3. The model has the maximum number or bytes of requests: ``overloaded``.
4. The model is ready: the request goes to the worker, unless the model is held, or suspects are
   tried there (`actors.machines.suspects`).
5. Otherwise the request waits. If its deadline passes meanwhile: ``deadline_exceeded``. (The
   worker enforces the deadlines of the requests that it has.) If the model is not loaded,
   `EnsureLoaded` requests the load. If the name is unknown, `ModelRemoved` ends the requests that
   wait.

Requests that a process had when it died wait again in their old order and go to the next process.
Only a request that kills a process on its own ends: ``quarantined``.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from actors.machines import admission_events as ev
from actors.machines.machine import RequestRecord
from actors.machines.suspects import Suspects
from protocol import errors
from protocol.errors import ErrorInfo

RETRY_AFTER_S = 5.0
"""Seconds until a client that got ``overloaded`` should try again. A guess: a full queue takes
longer to empty, but a place in it becomes free sooner."""


class OpenRequest(msgspec.Struct):
    """A request that has not ended. `lost`: a process died with it."""

    model: str
    size: int = 0
    forwarded: bool = False
    cancelled: bool = False
    deadline: float | None = None
    lost: bool = False


class Admission(msgspec.Struct):
    """The requests of all models."""

    max_requests: int = 1024
    max_bytes: int = 64 * 1024 * 1024
    """Both limits are per model. A single request may exceed the bytes when it is the only one."""
    draining: bool = False
    models: dict[str, ev.ModelChanged] = msgspec.field(default_factory=dict)
    """The last event of each known model."""
    requested_loads: set[str] = msgspec.field(default_factory=set)
    """Models that requests wait for and that are not known yet."""
    evicting: set[str] = msgspec.field(default_factory=set)
    held: set[str] = msgspec.field(default_factory=set)
    suspects: dict[str, Suspects] = msgspec.field(default_factory=dict)
    requests: dict[str, OpenRequest] = msgspec.field(default_factory=dict)
    """By id, in the order of arrival."""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    sizes: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes of requests by model."""

    @property
    def deadline(self) -> float | None:
        return min(self._deadlines().values(), default=None)

    def _deadlines(self) -> dict[str, float]:
        """Return the deadlines of the requests that wait here."""
        return {
            rid: request.deadline
            for rid, request in self.requests.items()
            if request.deadline is not None and not request.forwarded
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        if isinstance(event, ev.DrainStarted):
            self.draining = True
            return [] if self.requests else [ev.Drained()]
        commands = self._apply(event, now)
        ended = isinstance(event, ev.RequestFinished) or any(
            isinstance(command, ev.FailRequest | ev.ConfirmCancel) for command in commands
        )
        drained = ended and self.draining and not self.requests
        return [*commands, ev.Drained()] if drained else commands

    def _apply(self, event: ev.Event, now: float) -> list[ev.Command]:  # noqa: C901, PLR0911 - one match
        match event:
            case ev.ModelChanged():
                return self._model_changed(event)
            case ev.ModelEvicting(model=model):
                self.evicting.add(model)
                self.models[model] = ev.ModelChanged(model, "waiting")
                return []
            case ev.ModelEvicted(model=model):
                self.evicting.discard(model)
                self.models.pop(model, None)
                return self._request_load(model) if self._waiting(model) else []
            case ev.ModelHeld(model=model):
                self.held = self.held | {model} if event.held else self.held - {model}
                return self._forward_waiting(model)
            case ev.ModelRemoved(model=model, error=error):
                return self._model_removed(model, error)
            case ev.RequestArrived():
                return self._arrived(event)
            case ev.RequestsLost():
                return self._lost(event)
            case RequestRecord():
                request = self.requests.get(event.rid)
                return [] if request is None else self._apply_to_request(event, request)
            case ev.AlarmFired():
                return self._end_late(now)
            case ev.DrainStarted():
                return []

    def _apply_to_request(self, event: RequestRecord, request: OpenRequest) -> list[ev.Command]:
        rid, model = event.rid, request.model
        match event:
            case ev.RequestReturned():
                return self._returned(rid, request)
            case ev.QueuedInWorker():
                self._suspects(model).note_queued(rid)
            case ev.RequestProgressed():
                suspects = self._suspects(model)
                suspects.note_progress(rid)
                return self._forward_waiting(model) if suspects.careful else []
            case ev.RequestFinished():
                self._forget(rid)
                return self._forward_waiting(model)
            case ev.RequestCancelled() if not request.forwarded:
                return [self._confirm_cancel(rid)]
            case ev.RequestCancelled() if not request.cancelled:
                request.cancelled = True
                return [ev.CancelInWorker(rid, model)]
        return []

    def check(self) -> None:
        counts, sizes = Counter[str](), Counter[str]()
        for request in self.requests.values():
            counts[request.model] += 1
            sizes[request.model] += request.size
            if not request.forwarded:
                self._check_waiting(request)
        assert self.counts == counts, "requests counted wrongly"
        assert self.sizes == sizes, "bytes counted wrongly"
        assert all(count <= self.max_requests for count in self.counts.values()), "too many"
        for model, suspects in self.suspects.items():
            suspects.check()
            assert suspects.inside.keys() <= self.requests.keys(), "a suspect that is over"
            if self._is_ready(model) and model not in self.held:
                assert not suspects.careful or suspects.trying, "no group is tried"

    def _check_waiting(self, request: OpenRequest) -> None:
        model = request.model
        assert not request.cancelled, "a cancelled request waits"
        known = self.models.get(model)
        assert known or model in self.requested_loads, "a request waits for no model"
        held = model in self.held or (model in self.suspects and self.suspects[model].careful)
        waits = known is None or known.availability == "waiting" or held
        assert waits, "a request was forgotten"

    # -- a request --------------------------------------------------------------------------------

    def _arrived(self, event: ev.RequestArrived) -> list[ev.Command]:
        rid, model = event.rid, event.model
        if (refusal := self._refusal(model, event.size)) is not None:  # (1) to (3)
            return [ev.FailRequest(rid, refusal)]
        self.requests[rid] = OpenRequest(model, event.size, deadline=event.deadline)
        self.counts[model] = self.counts.get(model, 0) + 1
        self.sizes[model] = self.sizes.get(model, 0) + event.size
        if model not in self.models:  # (5)
            return self._request_load(model)
        if self._is_ready(model) and not self._suspects(model).careful and model not in self.held:
            return [self._forward(rid)]  # (4)
        return []  # (5)

    def _refusal(self, model: str, size: int) -> ErrorInfo | None:
        known = self.models.get(model)
        if self.draining:  # (1)
            return errors.Draining("the daemon takes no new work").info()
        if known is not None and known.availability == "closing":  # (1)
            return self._closing_error(model)
        if known is not None and known.availability == "failed":  # (2)
            return known.error or errors.ModelFailed(f"{model} has failed").info()
        if self.counts.get(model, 0) >= self.max_requests:  # (3)
            message = f"{model} already has {self.max_requests} requests, the limit"
        elif model in self.sizes and self.sizes[model] + size > self.max_bytes:  # (3)
            message = (
                f"the requests for {model} already take {self.sizes[model]} bytes; this one would "
                f"add {size}, and the limit is {self.max_bytes}"
            )
        else:
            return None
        return errors.Overloaded(message, retry_after_s=RETRY_AFTER_S).info()

    def _forward(self, rid: str) -> ev.Forward:
        request = self.requests[rid]
        request.forwarded = True
        self._suspects(request.model).enter(rid)
        return ev.Forward(rid, request.model)

    def _returned(self, rid: str, request: OpenRequest) -> list[ev.Command]:
        request.forwarded = False
        self._suspects(request.model).note_returned(rid)
        if request.cancelled:
            return [self._confirm_cancel(rid)]
        known = self.models.get(request.model)
        if known is None or known.availability in {"closing", "failed"}:
            error = known.error if known is not None else None
            return [self._fail(rid, error or self._closing_error(request.model))]
        return self._forward_waiting(request.model)

    def _confirm_cancel(self, rid: str) -> ev.ConfirmCancel:
        self._forget(rid)
        return ev.ConfirmCancel(rid)

    def _fail(self, rid: str, error: ErrorInfo) -> ev.FailRequest:
        self._forget(rid)
        return ev.FailRequest(rid, error)

    def _end(self, rid: str, error: ErrorInfo) -> list[ev.Command]:
        request = self.requests.get(rid)
        if request is None:
            return []
        return [self._confirm_cancel(rid) if request.cancelled else self._fail(rid, error)]

    def _forget(self, rid: str) -> None:
        request = self.requests.pop(rid)
        model = request.model
        if model in self.suspects:
            self.suspects[model].forget(rid)
        self.counts[model] -= 1
        self.sizes[model] -= request.size
        if not self.counts[model]:
            del self.counts[model], self.sizes[model]

    def _end_late(self, now: float) -> list[ev.Command]:
        late = [rid for rid, deadline in self._deadlines().items() if deadline <= now]
        message = "the deadline passed while the request waited for its model"
        return [self._fail(rid, errors.DeadlineExceeded(message).info()) for rid in late]

    # -- a model ----------------------------------------------------------------------------------

    def _is_ready(self, model: str) -> bool:
        known = self.models.get(model)
        return known is not None and known.availability == "ready"

    def _suspects(self, model: str) -> Suspects:
        return self.suspects.setdefault(model, Suspects())

    def _waiting(self, model: str) -> list[str]:
        requests = self.requests.items()
        return [rid for rid, it in requests if it.model == model and not it.forwarded]

    def _forward_waiting(self, model: str) -> list[ev.Command]:
        """Forward the requests that may go: the next group of suspects, or all if none is left."""
        suspects = self._suspects(model)
        trying = suspects.careful and suspects.trying
        if trying or model in self.held or not self._is_ready(model):
            return []
        waiting = self._waiting(model)
        while suspects.careful:
            group = [rid for rid in suspects.next_group() if rid in waiting]
            if group:
                return [self._forward(rid) for rid in group]
        return [self._forward(rid) for rid in waiting]

    def _request_load(self, model: str) -> list[ev.Command]:
        if model in self.requested_loads:
            return []
        self.requested_loads.add(model)
        return [ev.EnsureLoaded(model)]

    def _model_changed(self, event: ev.ModelChanged) -> list[ev.Command]:
        model, error = event.model, event.error
        if model in self.evicting and event.availability != "failed" and not self.draining:
            return []  # a state change that the eviction causes
        self.models[model] = event
        self.requested_loads.discard(model)
        match event.availability:
            case "waiting" if error and error.code == errors.InsufficientMemory.code:
                # The model restarts when there is memory, which may be never. Only requests that
                # a process already had continue to wait.
                fresh = [rid for rid in self._waiting(model) if not self.requests[rid].lost]
                return [self._fail(rid, error) for rid in fresh]
            case "waiting":
                return []
            case "ready":
                return self._forward_waiting(model)
            case "closing":
                error = self._closing_error(model)
            case "failed":
                error = error or errors.ModelFailed(f"{model} has failed").info()
        return [self._fail(rid, error) for rid in self._waiting(model)]

    def _closing_error(self, model: str) -> ErrorInfo:
        draining = f"the daemon takes no new work, and {model} is being stopped"
        reason = draining if self.draining else f"{model} is being unloaded"
        return errors.Draining(reason).info()

    def _model_removed(self, model: str, error: ErrorInfo | None) -> list[ev.Command]:
        known = self.models.pop(model, None)
        self.requested_loads.discard(model)
        self.evicting.discard(model)
        self.held.discard(model)
        error = error or (known.error if known is not None else None)
        error = error or self._closing_error(model)
        # Includes requests on their way to the worker, which will not be returned any more.
        rids = [rid for rid, request in self.requests.items() if request.model == model]
        commands = [command for rid in rids for command in self._end(rid, error)]
        self.suspects.pop(model, None)
        return commands

    # -- a process that died ----------------------------------------------------------------------

    def _lost(self, event: ev.RequestsLost) -> list[ev.Command]:
        model = event.model
        if not event.again and model not in self.evicting:
            return [command for rid in event.rids for command in self._end(rid, event.error)]
        if self._is_ready(model):
            # The `ModelChanged` that follows has not arrived yet.
            self.models[model] = ev.ModelChanged(model, "waiting")
        story = self._suspects(model).note_death(
            event.rids, event.error.message, attributable=event.attributable
        )
        blame = [] if story is None else [ev.ReportBlame(model, event.error.message)]
        results = [it for rid in event.rids for it in self._wait_again(rid, event.error, story)]
        return [*blame, *results]

    def _wait_again(self, rid: str, error: ErrorInfo, story: list[str] | None) -> list[ev.Command]:
        request = self.requests.get(rid)
        if request is None:
            return []
        request.forwarded, request.lost = False, True
        known = self.models.get(request.model)
        if request.cancelled:
            return [self._confirm_cancel(rid)]
        if story is not None:
            return [self._fail(rid, _quarantined(request.model, error, story))]
        if known is None or known.availability in {"closing", "failed"}:
            return [self._fail(rid, error)]
        return [ev.ReportPaused(rid)]


def _quarantined(model: str, error: ErrorInfo, story: list[str]) -> ErrorInfo:
    return errors.Quarantined(
        f"the process of {model} died {len(story)} times while it had this request, the last time "
        f"with no other request, so the request is not tried again; last death: {error.message}",
        story=story,
    ).info()
