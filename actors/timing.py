"""When things happened to one request, and the moments that follow from what its client is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors import telemetry
from protocol import messages

if TYPE_CHECKING:
    from actors.telemetry import Moment
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

    def begins(self, now: float) -> Moment | None:
        """Note that it runs from now on; return that only the first time."""
        begun, self.begun = self.begun, True
        if begun or self.arrived_at is None:
            return None
        return telemetry.Begun(self.model, now - self.arrived_at)

    def told(self, event: Event, now: float) -> Moment | None:  # noqa: PLR0911 - one match
        """Return what it means that the client is told this."""
        match event:
            case messages.Tokens(tokens=tokens) if tokens:
                return self._spoke(event.choice, len(tokens), now)
            case messages.Accepted(prompt_tokens=tokens):
                return telemetry.Taken(self.model, tokens)
            case messages.Paused(reason=reason):
                return telemetry.Paused(self.model, reason)
            case messages.Resumed():
                return telemetry.Resumed(self.model)
            case messages.Done(reason=reason):
                took_s = None if self.arrived_at is None else now - self.arrived_at
                return telemetry.Finished(self.model, reason, took_s)
            case messages.Error(error=error):
                return telemetry.Failed(self.model, error.code)
            case _:
                return None

    def _spoke(self, choice: int, count: int, now: float) -> Moment:
        before, first = self.spoke_at.get(choice), not self.spoke_at
        self.spoke_at[choice] = now
        if before is not None:
            return telemetry.Spoke(self.model, count, gap_s=now - before)
        if first and self.arrived_at is not None:
            return telemetry.Spoke(self.model, count, first_s=now - self.arrived_at)
        return telemetry.Spoke(self.model, count)
