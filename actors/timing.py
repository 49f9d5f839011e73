"""When things happened to one request, and the moments that follow from what its client is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors import telemetry
from protocol import messages

if TYPE_CHECKING:
    from actors.telemetry import Observation
    from protocol.messages import Event


@dataclass
class Timing:
    """One request's times, on the event loop's clock."""

    model: str
    arrived_at: float | None = None
    """None: it came to a daemon before this one."""
    begun: bool = False
    """It has begun once; what comes later is not its queue."""
    spoke_at: dict[int, float] = field(default_factory=dict)
    """When the newest tokens of each completion came."""

    def begins(self, now: float) -> Observation | None:
        """Note that it runs from now on; return that only the first time."""
        begun, self.begun = self.begun, True
        if begun or self.arrived_at is None:
            return None
        return telemetry.RequestAdmitted(self.model, now - self.arrived_at)

    def told(self, event: Event, now: float) -> Observation | None:  # noqa: PLR0911 - one match
        """Return what it means that the client is told this."""
        match event:
            case messages.Tokens(tokens=tokens) if tokens:
                return self._spoke(event.choice, len(tokens), now)
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

    def _spoke(self, choice: int, count: int, now: float) -> Observation:
        before, first = self.spoke_at.get(choice), not self.spoke_at
        self.spoke_at[choice] = now
        if before is not None:
            return telemetry.TokensSent(self.model, count, gap_s=now - before)
        if first and self.arrived_at is not None:
            return telemetry.TokensSent(self.model, count, first_s=now - self.arrived_at)
        return telemetry.TokensSent(self.model, count)
