"""What the prefix cache did for the newest requests, in memory only.

A miss that could have been avoided becomes a record in the event log, without any text of prompts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from actors import telemetry
from actors.event_log import EventLog
from protocol.cache_outcome import CacheOutcome, RequestOutcome
from protocol.cache_text import summary

MAX_OUTCOMES = 256
"""Requests kept; each takes about 1 KiB."""
RECORDED_TOKENS = 1024
"""Tokens computed again from which on a miss is recorded."""
RECORD_SECONDS = 10.0
"""Seconds between two records of one model. A client that always misses would otherwise fill the
event log."""
_RECLAIM_SECONDS = 60.0
"""Seconds that a reclaim of checkpoints may take until they are dropped."""


@dataclass
class CacheOutcomes:
    """The newest requests, and what the cache did for each."""

    events: EventLog
    recent: deque[RequestOutcome] = field(default_factory=lambda: deque(maxlen=MAX_OUTCOMES))
    _recorded_at: dict[str, float] = field(default_factory=dict)
    """When a miss of each model was last recorded."""

    def record(self, rid: str, client_id: str, model: str, outcome: CacheOutcome) -> None:
        """Keep the outcome of a request; count it, and record an avoidable miss."""
        events, now = self.events, self.events.clock()
        events.observe(telemetry.PromptCached(model, outcome))
        outcome = self._with_requester(model, outcome)
        self.recent.append(
            RequestOutcome(request=rid, client_id=client_id, model=model, at=now, outcome=outcome)
        )
        last = self._recorded_at.get(model)
        if avoidable_tokens(outcome) < RECORDED_TOKENS:
            return
        if last is not None and last <= now < last + RECORD_SECONDS:
            return
        self._recorded_at[model] = now
        events.record(
            "cache_miss", model, f"request {rid}: {summary(outcome)}", numbers=_numbers(outcome)
        )

    def find(self, request: str | None) -> list[RequestOutcome]:
        """Return a request's outcome, or all, the newest first."""
        newest = reversed(self.recent)
        return [one for one in newest if request in (None, one.request, one.client_id)]

    def _with_requester(self, model: str, outcome: CacheOutcome) -> CacheOutcome:
        """Add the model for which the daemon reclaimed the checkpoint."""
        eviction = outcome.eviction
        if eviction is None or eviction.cause != "reclaim":
            return outcome
        for record in reversed(self.events.records):
            if record.at < eviction.at - _RECLAIM_SECONDS:
                break
            ours = record.kind == "reclaim_prefixes" and record.model == model
            if ours and record.at <= eviction.at and record.requester:
                return replace(outcome, eviction=replace(eviction, requester=record.requester))
        return outcome


def avoidable_tokens(outcome: CacheOutcome) -> int:
    """Return the tokens that another prompt or configuration would have found in the cache.

    Tokens after a difference count if it is before the last message. The last one usually is new.
    """
    counted = {"between", "evicted", "unread"}
    place = None if outcome.difference is None else outcome.difference.place
    if place is not None and (place.kind != "message" or place.number < place.of):
        counted.add("differs")
    return sum(part.tokens for part in outcome.parts if part.reason in counted)


def _numbers(outcome: CacheOutcome) -> dict[str, int]:
    numbers = {"prompt_tokens": outcome.prompt_tokens, "cached_tokens": outcome.reused_tokens}
    if (difference := outcome.difference) is not None:
        numbers["token"] = difference.token
        if difference.place is not None and difference.place.kind == "message":
            numbers["message"] = difference.place.number
    return numbers
