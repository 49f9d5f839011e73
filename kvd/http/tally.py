"""What the events of a request say beside its text: usage, waiting, levels, and whether it is over.

Pure: the time comes in with the event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from kvd.http.responses import Extension, PromptDetails, Usage
from protocol import messages
from protocol.messages import Event
from protocol.types import Usage as Took


@dataclass
class _Call:
    """One prompt's part."""

    seed: int | None = None
    accepted_at: float | None = None
    paused_at: float | None = None
    paused_s: float = 0.0
    was_paused: bool = False
    resumed: int = 0
    took: Took | None = None


@dataclass
class Tally:
    """Counts for all calls of one HTTP request."""

    count: int
    began_at: float
    _calls: list[_Call] = field(init=False)

    def __post_init__(self) -> None:
        self._calls = [_Call() for _ in range(self.count)]

    def hear(self, number: int, event: Event, now: float) -> None:
        """Take an event of the call of this number."""
        call = self._calls[number]
        match event:
            case messages.Accepted(seed=seed):
                call.seed, call.accepted_at = seed, now
            case messages.Paused():
                call.was_paused, call.paused_at = True, now
            case messages.Resumed():
                call.resumed += 1
                _rested(call, now)
            case messages.Done(usage=took):
                call.took = took
                _rested(call, now)
            case _:
                pass

    @property
    def over(self) -> bool:
        """Whether all calls are done."""
        return all(call.took is not None for call in self._calls)

    @property
    def usage(self) -> Usage:
        """What all calls took so far."""
        took = [call.took for call in self._calls if call.took is not None]
        prompt = sum(one.prompt_tokens for one in took)
        completion = sum(one.completion_tokens for one in took)
        cached = sum(one.cached_tokens for one in took)
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached))

    @property
    def extension(self) -> Extension:
        """What is known; of several prompts no seed, and of times the longest."""
        calls = self._calls
        levels = [call.took.levels for call in calls if call.took is not None and call.took.levels]
        queued = [c.accepted_at - self.began_at for c in calls if c.accepted_at is not None]
        seed = calls[0].seed if len(calls) == 1 else None
        steps = sorted({level for one in levels for level in one})
        paused = any(call.was_paused for call in calls)
        return Extension(
            seed=UNSET if seed is None else seed,
            level=max(one[-1] for one in levels) if levels else UNSET,
            levels=steps if len(steps) > 1 else UNSET,
            queued_ms=_ms(max(queued)) if queued else UNSET,
            paused_ms=_ms(max(call.paused_s for call in calls)) if paused else UNSET,
            resumed=sum(call.resumed for call in calls) if paused else UNSET,
        )


def _rested(call: _Call, now: float) -> None:
    if call.paused_at is not None:
        call.paused_s += now - call.paused_at
        call.paused_at = None


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
