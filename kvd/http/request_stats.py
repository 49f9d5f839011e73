"""Usage, waiting times and precision levels of one HTTP request, from its events. Sans-io."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from kvd.http.responses import CompletionDetails, Extension, PromptDetails, Usage
from protocol import messages
from protocol.messages import Event
from protocol.types import Usage as CallUsage


@dataclass
class _Call:
    """The call for one prompt."""

    seed: int | None = None
    accepted_at: float | None = None
    paused_at: float | None = None
    paused_s: float = 0.0
    was_paused: bool = False
    resumed: int = 0
    usage: CallUsage | None = None
    """None while the call runs."""
    notes: list[str] = field(default_factory=list)

    def end_pause(self, now: float) -> None:
        if self.paused_at is not None:
            self.paused_s += now - self.paused_at
            self.paused_at = None


@dataclass
class RequestStats:
    """Sums over all calls of one HTTP request."""

    count: int
    began_at: float
    _calls: list[_Call] = field(init=False)

    def __post_init__(self) -> None:
        self._calls = [_Call() for _ in range(self.count)]

    def handle(self, number: int, event: Event, now: float) -> None:
        call = self._calls[number]
        match event:
            case messages.Accepted(seed=seed):
                call.seed, call.accepted_at = seed, now
            case messages.Paused():
                call.was_paused, call.paused_at = True, now
            case messages.Resumed():
                call.resumed += 1
                call.end_pause(now)
            case messages.Done(usage=usage, notes=notes):
                call.usage, call.notes = usage, notes
                call.end_pause(now)
            case _:
                pass

    @property
    def over(self) -> bool:
        return all(call.usage is not None for call in self._calls)

    @property
    def usage(self) -> Usage:
        usages = [call.usage for call in self._calls if call.usage is not None]
        prompt = sum(usage.prompt_tokens for usage in usages)
        completion = sum(usage.completion_tokens for usage in usages)
        cached = sum(usage.cached_tokens for usage in usages)
        reasoning = sum(usage.reasoning_tokens for usage in usages)
        details = CompletionDetails(reasoning) if reasoning else UNSET
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached), details)

    @property
    def extension(self) -> Extension:
        """The fields under the key ``kvd``.

        With several prompts there is no seed, and times are those of the slowest call.
        """
        calls = self._calls
        levels = [call.usage.levels for call in calls if call.usage and call.usage.levels]
        queued = [c.accepted_at - self.began_at for c in calls if c.accepted_at is not None]
        seed = calls[0].seed if len(calls) == 1 else None
        all_levels = sorted({level for levels_of_call in levels for level in levels_of_call})
        paused = any(call.was_paused for call in calls)
        notes = [note for call in calls for note in call.notes]
        return Extension(
            seed=UNSET if seed is None else seed,
            level=max(levels_of_call[-1] for levels_of_call in levels) if levels else UNSET,
            levels=all_levels if len(all_levels) > 1 else UNSET,
            queued_ms=_ms(max(queued)) if queued else UNSET,
            paused_ms=_ms(max(call.paused_s for call in calls)) if paused else UNSET,
            resumed=sum(call.resumed for call in calls) if paused else UNSET,
            notes=notes or UNSET,
        )


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
