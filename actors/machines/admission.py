"""Which request goes to which worker, and what becomes of it when the worker goes. Pure.

A request waits while its model loads or comes back, and goes to the worker as soon as that is
ready; the worker's own scheduler decides about rows. Each request ends exactly once: by its
worker, or by `End` or `EndCancelled` here. Knows ids only, no prompts and no clients.

What becomes of a request that arrives:

1. the daemon drains, or the model is being unloaded: ``draining``;
2. there is no such model: ``unknown_model``;
3. the model was given up: its own error;
4. it holds as many as it may, or as many bytes: ``overloaded``;
5. it is ready: to the worker;
6. else it waits, until its deadline: ``deadline_exceeded``. The worker heeds that of those it has.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import (
    DeadlineExceeded,
    Draining,
    ErrorInfo,
    InsufficientMemory,
    KvdError,
    ModelFailed,
    Overloaded,
    UnknownModel,
)

RETRY_AFTER_S = 5.0
"""A guess: a queue of this length takes longer, a place in it comes free earlier."""


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


Standing = Literal["waiting", "ready", "closing", "failed"]


class ModelIs(_Tagged, frozen=True):
    """A model's worker changed; the first one of a model makes it known."""

    model: str
    standing: Standing
    error: ErrorInfo | None = None
    """With ``failed``."""


class ModelGone(_Tagged, frozen=True):
    """Its worker is gone for good, and so is its name."""

    model: str


class Arrived(_Tagged, frozen=True):
    """A new request."""

    rid: str
    model: str
    size: int = 0
    """The bytes that the daemon holds for it until it is over."""
    deadline: float | None = None
    """When it is of no use any more, on the machine's clock."""


class Bounced(_Tagged, frozen=True):
    """The process never got it."""

    rid: str


class RowsLost(_Tagged, frozen=True):
    """The process died with these."""

    rids: list[str]
    error: ErrorInfo


class Over(_Tagged, frozen=True):
    """The worker has ended it."""

    rid: str


class Unwanted(_Tagged, frozen=True):
    """Its client cancelled it, or is gone."""

    rid: str


class DrainAll(_Tagged, frozen=True):
    """No new requests from now on; `Quiet` follows when none is left."""


class Rang(_Tagged, frozen=True):
    """The time may have come that `Desk.deadline` said."""


Event = ModelIs | ModelGone | Arrived | Bounced | RowsLost | Over | Unwanted | DrainAll | Rang


class Forward(_Tagged, frozen=True):
    """Give it to the model's worker."""

    rid: str
    model: str


class Withdraw(_Tagged, frozen=True):
    """Tell the model's worker to cancel it."""

    rid: str
    model: str


class End(_Tagged, frozen=True):
    """Tell its client that it failed."""

    rid: str
    error: ErrorInfo


class EndCancelled(_Tagged, frozen=True):
    """Tell its client that it was cancelled; no worker has it."""

    rid: str


class Quiet(_Tagged, frozen=True):
    """Nothing runs any more."""


Command = Forward | Withdraw | End | EndCancelled | Quiet


class Held(msgspec.Struct):
    """A request that has not ended."""

    model: str
    size: int = 0
    forwarded: bool = False
    unwanted: bool = False
    deadline: float | None = None


class Desk(msgspec.Struct):
    """All requests of all models."""

    most: int = 1024
    """Requests of one model, waiting or running."""
    most_bytes: int = 64 * 1024 * 1024
    """Of the same; one that is alone may have more."""
    draining: bool = False
    models: dict[str, ModelIs] = msgspec.field(default_factory=dict)
    requests: dict[str, Held] = msgspec.field(default_factory=dict)
    """In the order of their arrival."""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests by model."""
    sizes: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes by model."""

    @property
    def deadline(self) -> float | None:
        """When the first of those that wait here must not wait any longer."""
        times = [
            held.deadline
            for held in self.requests.values()
            if held.deadline is not None and not held.forwarded
        ]
        return min(times, default=None)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event and return what is to be done."""
        match event:
            case ModelIs():
                self.models[event.model] = event
                commands = self._model_is(event)
            case ModelGone(model=model):
                commands = self._end_all(model)
                self.models.pop(model, None)
            case Arrived():
                commands = self._arrive(event)
            case Bounced(rid=rid):
                commands = self._bounce(rid)
            case RowsLost(rids=rids, error=error):
                commands = [c for rid in rids for c in self._lose(rid, error)]
            case Over(rid=rid):
                self._forget(rid)
                commands = []
            case Unwanted(rid=rid):
                commands = self._cancel(rid)
            case Rang():
                commands = self._end_late(now)
            case DrainAll():
                self.draining = True
                return [] if self.requests else [Quiet()]
        ended = isinstance(event, Over) or any(isinstance(c, End | EndCancelled) for c in commands)
        quiet = ended and self.draining and not self.requests
        return [*commands, Quiet()] if quiet else commands

    def check(self) -> None:
        """Check the invariants."""
        counts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for held in self.requests.values():
            counts[held.model] = counts.get(held.model, 0) + 1
            sizes[held.model] = sizes.get(held.model, 0) + held.size
            if not held.forwarded:
                assert not held.unwanted, "a cancelled request waits"
                assert held.model in self.models, "a request waits for no model"
                assert self.models[held.model].standing == "waiting", "a request was forgotten"
        assert (counts, sizes) == (self.counts, self.sizes), "counted wrongly"
        assert all(count <= self.most for count in counts.values()), "too many"

    def _arrive(self, event: Arrived) -> list[Command]:
        rid, model = event.rid, event.model
        if (refusal := self._refusal(model, event.size)) is not None:  # (1) to (4)
            return [End(rid, refusal)]
        self.requests[rid] = Held(model, event.size, deadline=event.deadline)
        self.counts[model] = self.counts.get(model, 0) + 1
        self.sizes[model] = self.sizes.get(model, 0) + event.size
        return self._place(rid)

    def _refusal(self, model: str, size: int) -> ErrorInfo | None:
        known = self.models.get(model)
        refusal: KvdError
        if self.draining:  # (1)
            refusal = Draining("the daemon takes no new work")
        elif known is None:  # (2)
            names = ", ".join(sorted(self.models)) or "none"
            refusal = UnknownModel(
                f"no model {model!r} is loaded (loaded: {names}); load it first", model=model
            )
        elif known.standing == "closing":  # (1)
            refusal = Draining(f"{model} is being unloaded")
        elif known.standing == "failed":  # (3)
            return known.error or ModelFailed(f"{model} has failed").info()
        elif self.counts.get(model, 0) >= self.most:  # (4)
            refusal = Overloaded(
                f"{model} holds {self.most} requests already", retry_after_s=RETRY_AFTER_S
            )
        elif model in self.sizes and self.sizes[model] + size > self.most_bytes:  # (4)
            refusal = Overloaded(
                f"the requests that {model} holds have {self.sizes[model]} bytes already; this one "
                f"has {size}, and the limit is {self.most_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        else:
            return None
        return refusal.info()

    def _place(self, rid: str) -> list[Command]:
        held = self.requests[rid]
        if self.models[held.model].standing == "ready":  # (5)
            held.forwarded = True
            return [Forward(rid, held.model)]
        return []  # (6)

    def _model_is(self, event: ModelIs) -> list[Command]:
        model = event.model
        match event.standing:
            case "waiting" if event.error and event.error.code == InsufficientMemory.code:
                # It comes back when there is memory, which may be never.
                return self._end_waiting(model, event.error)
            case "waiting":
                return []
            case "ready":
                waiting = [
                    rid
                    for rid, held in self.requests.items()
                    if held.model == model and not held.forwarded
                ]
                return [c for rid in waiting for c in self._place(rid)]
            case "closing":
                return self._end_waiting(model, self._closing(model))
            case "failed":
                error = event.error or ModelFailed(f"{model} has failed").info()
                return self._end_waiting(model, error)

    def _closing(self, model: str) -> ErrorInfo:
        if self.draining:
            return Draining(f"the daemon takes no new work, and {model} is being stopped").info()
        return Draining(f"{model} is being unloaded").info()

    def _end_waiting(self, model: str, error: ErrorInfo) -> list[Command]:
        waiting = [
            rid for rid, held in self.requests.items() if held.model == model and not held.forwarded
        ]
        return [self._end(rid, error) for rid in waiting]

    def _end_late(self, now: float) -> list[Command]:
        late = [
            rid
            for rid, held in self.requests.items()
            if held.deadline is not None and held.deadline <= now and not held.forwarded
        ]
        error = DeadlineExceeded("its deadline passed while it waited for its model")
        return [self._end(rid, error.info()) for rid in late]

    def _end_all(self, model: str) -> list[Command]:
        # Nobody speaks any more for those that were on their way to the worker.
        known = self.models.get(model)
        error = known.error if known is not None else None
        error = error or UnknownModel(f"{model} was unloaded", model=model).info()
        rids = [rid for rid, held in self.requests.items() if held.model == model]
        return [c for rid in rids for c in self._lose(rid, error)]

    def _bounce(self, rid: str) -> list[Command]:
        held = self.requests.get(rid)
        if held is None:
            return []
        held.forwarded = False
        if held.unwanted:
            self._forget(rid)
            return [EndCancelled(rid)]
        known = self.models.get(held.model)
        if known is None or known.standing in {"closing", "failed"}:
            error = known.error if known is not None and known.error is not None else None
            return [self._end(rid, error or self._closing(held.model))]
        return self._place(rid)

    def _lose(self, rid: str, error: ErrorInfo) -> list[Command]:
        held = self.requests.get(rid)
        if held is None:
            return []
        if held.unwanted:
            self._forget(rid)
            return [EndCancelled(rid)]
        return [self._end(rid, error)]

    def _cancel(self, rid: str) -> list[Command]:
        held = self.requests.get(rid)
        if held is None or held.unwanted:
            return []
        if held.forwarded:
            held.unwanted = True
            return [Withdraw(rid, held.model)]
        self._forget(rid)
        return [EndCancelled(rid)]

    def _end(self, rid: str, error: ErrorInfo) -> End:
        self._forget(rid)
        return End(rid, error)

    def _forget(self, rid: str) -> None:
        held = self.requests.pop(rid, None)
        if held is None:
            return
        self.counts[held.model] -= 1
        self.sizes[held.model] -= held.size
        if not self.counts[held.model]:
            del self.counts[held.model], self.sizes[held.model]
