"""Timestamps of one request, and the observations that follow from its events."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors import telemetry
from actors.telemetry import Observation
from protocol import messages
from protocol.messages import Event


@dataclass
class Timing:
    """Timestamps of one request, on the event loop's clock."""

    model: str
    arrived_at: float | None = None
    """None if an earlier daemon accepted the request."""
    admitted: bool = False
    """Whether the request was admitted before; a later admission follows a restart."""
    tokens_at: dict[int, float] = field(default_factory=dict)
    """Time of the newest tokens by choice."""

    def observe_admission(self, now: float) -> Observation | None:
        """Return an observation for the first admission only."""
        before, self.admitted = self.admitted, True
        if before or self.arrived_at is None:
            return None
        return telemetry.RequestAdmitted(self.model, now - self.arrived_at)

    def observe_event(self, event: Event, now: float) -> Observation | None:  # noqa: PLR0911
        """Return the observation for an event sent to the client, if there is one."""
        match event:
            case messages.Tokens(tokens=tokens) if tokens:
                return self._observe_tokens(event.choice, len(tokens), now)
            case messages.Accepted(prompt_tokens=tokens):
                return telemetry.RequestAccepted(self.model, tokens)
            case messages.Paused(reason=reason):
                return telemetry.RequestPaused(self.model, reason)
            case messages.Resumed():
                return telemetry.RequestResumed(self.model)
            case messages.Done(reason=reason):
                took_s = None if self.arrived_at is None else now - self.arrived_at
                return telemetry.RequestFinished(self.model, reason, took_s)
            case messages.Error(error=error):
                return telemetry.RequestFailed(self.model, error.code)
            case _:
                return None

    def _observe_tokens(self, choice: int, count: int, now: float) -> Observation:
        before, first = self.tokens_at.get(choice), not self.tokens_at
        self.tokens_at[choice] = now
        if before is not None:
            return telemetry.TokensSent(self.model, count, gap_s=now - before)
        if first and self.arrived_at is not None:
            return telemetry.TokensSent(self.model, count, first_s=now - self.arrived_at)
        return telemetry.TokensSent(self.model, count)
