"""Which request goes to which worker, and what becomes of it when the worker goes. Pure.

A request waits while its model loads or comes back, and goes to the worker as soon as that is
ready; the worker's own scheduler decides about rows. Each request ends exactly once: by its
worker, or by `End` or `EndCancelled` here. Knows ids only, no prompts and no clients.

What becomes of a request that arrives:

1. the daemon drains, or the model is being unloaded: ``draining``;
2. the model was given up: its own error;
3. it holds as many as it may, or as many bytes: ``overloaded``;
4. it is ready: to the worker, unless suspects are tried there (`actors.machines.suspects`);
5. else it waits, until its deadline: ``deadline_exceeded``. The worker heeds that of those it has.
   Of a model that is not here the supervisor is told (`Summon`); if it knows none, `ModelGone`
   ends those that wait.

What the process took with it waits again in its old place, and goes into the next one; but for
one that the process dies of alone: ``quarantined``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.machines.suspects import Suspects
from protocol.errors import (
    DeadlineExceeded,
    Draining,
    ErrorInfo,
    InsufficientMemory,
    KvdError,
    ModelFailed,
    Overloaded,
    Quarantined,
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
    """Its worker is gone for good, and so is its name; or there never was one."""

    model: str
    error: ErrorInfo | None = None
    """Of its requests; absent: it was unloaded."""


class Rests(_Tagged, frozen=True):
    """A model is being unloaded to make room: what it cannot finish waits, as new requests do."""

    model: str


class Asleep(_Tagged, frozen=True):
    """It is gone, until a request asks for it."""

    model: str


class Kept(_Tagged, frozen=True):
    """New requests for a model wait here, so that others get their turn; or no longer."""

    model: str
    held: bool


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

    model: str
    rids: list[str]
    error: ErrorInfo
    attributable: bool = False
    """They, or the process itself, may have caused it."""
    again: bool = True
    """Another process follows, for them to go on in."""


class Gained(_Tagged, frozen=True):
    """It has made a new token, its first since it went to the process."""

    rid: str


class LinedUp(_Tagged, frozen=True):
    """It waits in the worker's own queue."""

    rid: str


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


Event = (
    ModelIs
    | ModelGone
    | Rests
    | Asleep
    | Kept
    | Arrived
    | Bounced
    | RowsLost
    | Gained
    | LinedUp
    | Over
    | Unwanted
    | DrainAll
    | Rang
)


class Forward(_Tagged, frozen=True):
    """Give it to the model's worker."""

    rid: str
    model: str


class Withdraw(_Tagged, frozen=True):
    """Tell the model's worker to cancel it."""

    rid: str
    model: str


class Summon(_Tagged, frozen=True):
    """Tell the supervisor that a request names this model, which is not here."""

    model: str


class Suspend(_Tagged, frozen=True):
    """Tell its client that it waits for another process, and goes on then."""

    rid: str


class Blame(_Tagged, frozen=True):
    """Tell the model's worker that a request was found that its process died of."""

    model: str
    reason: str
    """Its last death."""


class End(_Tagged, frozen=True):
    """Tell its client that it failed."""

    rid: str
    error: ErrorInfo


class EndCancelled(_Tagged, frozen=True):
    """Tell its client that it was cancelled; no worker has it."""

    rid: str


class Quiet(_Tagged, frozen=True):
    """Nothing runs any more."""


Command = Forward | Withdraw | Summon | Suspend | Blame | End | EndCancelled | Quiet


class Held(msgspec.Struct):
    """A request that has not ended."""

    model: str
    size: int = 0
    forwarded: bool = False
    unwanted: bool = False
    deadline: float | None = None
    lost: bool = False
    """A process died with it."""


class Desk(msgspec.Struct):
    """All requests of all models."""

    most: int = 1024
    """Requests of one model, waiting or running."""
    most_bytes: int = 64 * 1024 * 1024
    """Of the same; one that is alone may have more."""
    draining: bool = False
    models: dict[str, ModelIs] = msgspec.field(default_factory=dict)
    summoned: set[str] = msgspec.field(default_factory=set)
    """Models that requests wait for and that are not known yet."""
    resting: set[str] = msgspec.field(default_factory=set)
    """Models that are being unloaded to make room."""
    kept: set[str] = msgspec.field(default_factory=set)
    """Models whose new requests wait."""
    suspects: dict[str, Suspects] = msgspec.field(default_factory=dict)
    """By model."""
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

    def handle(self, event: Event, now: float) -> list[Command]:  # noqa: C901, PLR0912 - one match
        """Take an event and return what is to be done."""
        match event:
            case ModelIs():
                commands = [] if self._is_known_to_rest(event) else self._model_is(event)
            case Rests(model=model):
                self.resting.add(model)
                self.models[model] = ModelIs(model, "waiting")
                commands = []
            case Asleep(model=model):
                commands = self._asleep(model)
            case Kept(model=model):
                self.kept = self.kept | {model} if event.held else self.kept - {model}
                commands = self._release(model)
            case ModelGone(model=model, error=error):
                commands = self._end_all(model, error)
                self.models.pop(model, None)
                self.summoned.discard(model)
                self.resting.discard(model)
                self.kept.discard(model)
                self.suspects.pop(model, None)
            case Arrived():
                commands = self._arrive(event)
            case Bounced(rid=rid):
                commands = self._bounce(rid)
            case RowsLost():
                commands = self._lost(event)
            case LinedUp(rid=rid):
                if (held := self.requests.get(rid)) is not None:
                    self._suspects(held.model).lined_up(rid)
                commands = []
            case Gained(rid=rid):
                commands = self._gained(rid)
            case Over(rid=rid):
                held = self.requests.get(rid)
                self._forget(rid)
                commands = [] if held is None else self._release(held.model)
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
                known = self.models.get(held.model)
                assert known or held.model in self.summoned, "a request waits for no model"
                held_back = held.model in self.suspects and self.suspects[held.model].careful
                held_back = held_back or held.model in self.kept
                waits = known is None or known.standing == "waiting" or held_back
                assert waits, "a request was forgotten"
        assert (counts, sizes) == (self.counts, self.sizes), "counted wrongly"
        assert all(count <= self.most for count in counts.values()), "too many"
        for suspects in self.suspects.values():
            suspects.check()
            assert suspects.inside.keys() <= self.requests.keys(), "a suspect that is over"
        for model, suspects in self.suspects.items():
            known = self.models.get(model)
            if known is not None and known.standing == "ready" and model not in self.kept:
                assert not suspects.careful or suspects.trying, "nobody is tried"

    def _arrive(self, event: Arrived) -> list[Command]:
        rid, model = event.rid, event.model
        if (refusal := self._refusal(model, event.size)) is not None:  # (1) to (3)
            return [End(rid, refusal)]
        self.requests[rid] = Held(model, event.size, deadline=event.deadline)
        self.counts[model] = self.counts.get(model, 0) + 1
        self.sizes[model] = self.sizes.get(model, 0) + event.size
        if model in self.models:
            return self._place(rid)
        known, self.summoned = model in self.summoned, self.summoned | {model}
        return [] if known else [Summon(model)]

    def _refusal(self, model: str, size: int) -> ErrorInfo | None:
        known = self.models.get(model)
        refusal: KvdError
        if self.draining:  # (1)
            refusal = Draining("the daemon takes no new work")
        elif known is not None and known.standing == "closing":  # (1)
            refusal = Draining(f"{model} is being unloaded")
        elif known is not None and known.standing == "failed":  # (2)
            return known.error or ModelFailed(f"{model} has failed").info()
        elif self.counts.get(model, 0) >= self.most:  # (3)
            refusal = Overloaded(
                f"{model} holds {self.most} requests already", retry_after_s=RETRY_AFTER_S
            )
        elif model in self.sizes and self.sizes[model] + size > self.most_bytes:  # (3)
            refusal = Overloaded(
                f"the requests that {model} holds have {self.sizes[model]} bytes already; this one "
                f"has {size}, and the limit is {self.most_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        else:
            return None
        return refusal.info()

    def _place(self, rid: str) -> list[Command]:
        model = self.requests[rid].model
        known, suspects = self.models.get(model), self._suspects(model)
        free = not suspects.careful and model not in self.kept
        if known is not None and known.standing == "ready" and free:  # (4)
            return [self._forward(rid)]
        return []  # (5)

    def _forward(self, rid: str) -> Forward:
        held = self.requests[rid]
        held.forwarded = True
        self._suspects(held.model).enter(rid)
        return Forward(rid, held.model)

    def _suspects(self, model: str) -> Suspects:
        return self.suspects.setdefault(model, Suspects())

    def _waiting(self, model: str) -> list[str]:
        return [
            rid for rid, held in self.requests.items() if held.model == model and not held.forwarded
        ]

    def _release(self, model: str) -> list[Command]:
        """Let those go that may: while suspects are tried, the next group of them, else all."""
        known, suspects = self.models.get(model), self._suspects(model)
        if known is None or known.standing != "ready" or (suspects.careful and suspects.trying):
            return []
        if model in self.kept:
            return []
        waiting = self._waiting(model)
        while suspects.careful:
            group = [rid for rid in suspects.next_group() if rid in waiting]
            if group:
                return [self._forward(rid) for rid in group]
        return [self._forward(rid) for rid in waiting]

    def _is_known_to_rest(self, event: ModelIs) -> bool:
        """Return whether this is only what being unloaded to make room looks like."""
        return event.model in self.resting and event.standing != "failed" and not self.draining

    def _asleep(self, model: str) -> list[Command]:
        self.resting.discard(model)
        self.models.pop(model, None)
        if not self._waiting(model) or model in self.summoned:
            return []
        self.summoned.add(model)
        return [Summon(model)]

    def _model_is(self, event: ModelIs) -> list[Command]:
        model = event.model
        self.models[model] = event
        self.summoned.discard(model)
        match event.standing:
            case "waiting" if event.error and event.error.code == InsufficientMemory.code:
                # It comes back when there is memory, which may be never; what was begun waits on.
                return self._end_waiting(model, event.error, begun=False)
            case "waiting":
                return []
            case "ready":
                return self._release(model)
            case "closing":
                return self._end_waiting(model, self._closing(model))
            case "failed":
                error = event.error or ModelFailed(f"{model} has failed").info()
                return self._end_waiting(model, error)

    def _closing(self, model: str) -> ErrorInfo:
        if self.draining:
            return Draining(f"the daemon takes no new work, and {model} is being stopped").info()
        return Draining(f"{model} is being unloaded").info()

    def _end_waiting(self, model: str, error: ErrorInfo, *, begun: bool = True) -> list[Command]:
        waiting = [rid for rid in self._waiting(model) if begun or not self.requests[rid].lost]
        return [self._end(rid, error) for rid in waiting]

    def _end_late(self, now: float) -> list[Command]:
        late = [
            rid
            for rid, held in self.requests.items()
            if held.deadline is not None and held.deadline <= now and not held.forwarded
        ]
        error = DeadlineExceeded("its deadline passed while it waited for its model")
        return [self._end(rid, error.info()) for rid in late]

    def _end_all(self, model: str, error: ErrorInfo | None) -> list[Command]:
        # Nobody speaks any more for those that were on their way to the worker.
        known = self.models.get(model)
        error = error or (known.error if known is not None else None)
        error = error or UnknownModel(f"{model} was unloaded", model=model).info()
        rids = [rid for rid, held in self.requests.items() if held.model == model]
        return [c for rid in rids for c in self._lose(rid, error)]

    def _bounce(self, rid: str) -> list[Command]:
        held = self.requests.get(rid)
        if held is None:
            return []
        held.forwarded = False
        self._suspects(held.model).bounced(rid)
        if held.unwanted:
            self._forget(rid)
            return [EndCancelled(rid)]
        known = self.models.get(held.model)
        if known is None or known.standing in {"closing", "failed"}:
            error = known.error if known is not None and known.error is not None else None
            return [self._end(rid, error or self._closing(held.model))]
        return self._release(held.model)

    def _lost(self, event: RowsLost) -> list[Command]:
        if not event.again and event.model not in self.resting:
            return [c for rid in event.rids for c in self._lose(rid, event.error)]
        model = event.model
        if (known := self.models.get(model)) is not None and known.standing == "ready":
            self.models[model] = ModelIs(model, "waiting")  # its own word of that is on the way
        story = self._suspects(model).died(
            event.rids, event.error.message, attributable=event.attributable
        )
        commands: list[Command] = [] if story is None else [Blame(model, event.error.message)]
        for rid in event.rids:
            commands += self._wait_again(rid, event.error, story)
        return commands

    def _wait_again(self, rid: str, error: ErrorInfo, story: list[str] | None) -> list[Command]:
        held = self.requests.get(rid)
        if held is None:
            return []
        held.forwarded, held.lost = False, True
        if held.unwanted:
            self._forget(rid)
            return [EndCancelled(rid)]
        if story is not None:
            return [self._end(rid, _quarantined(held.model, error, story))]
        known = self.models.get(held.model)
        if known is None or known.standing in {"closing", "failed"}:
            return [self._end(rid, error)]
        return [Suspend(rid)]

    def _gained(self, rid: str) -> list[Command]:
        held = self.requests.get(rid)
        if held is None:
            return []
        suspects = self._suspects(held.model)
        suspects.gained(rid)
        return self._release(held.model) if suspects.careful else []

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
        if held.model in self.suspects:
            self.suspects[held.model].over(rid)
        self.counts[held.model] -= 1
        self.sizes[held.model] -= held.size
        if not self.counts[held.model]:
            del self.counts[held.model], self.sizes[held.model]


def _quarantined(model: str, error: ErrorInfo, story: list[str]) -> ErrorInfo:
    return Quarantined(
        f"the process of {model} died of this request, {len(story)} times and the last time with "
        f"no other in it, so it is not tried again; the last death: {error.message}",
        story=story,
    ).info()
