"""Counts the actors' observations (`actors.telemetry`) by model, in about a microsecond each.

Only known models have their own counters; all other names count under ``""``. Models that are no
longer known keep their counters, up to `KEPT_AFTER_UNLOAD` of them, if they were ever ready or had
requests.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from actors import telemetry
from actors.machines.prefix_store_events import Refusal
from actors.machines.process_exit import CAUSES
from kvd.metrics import bounds
from kvd.metrics.histogram import Histogram
from kvd.metrics.worker_counters import WorkerCounters
from protocol.cache_outcome import CacheReason
from protocol.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.telemetry import Observation

KEPT_AFTER_UNLOAD = 16
"""Number of models that are no longer known and whose counters are kept."""
NO_MODEL = ""
"""The label of observations without a known model."""
FAILURES = (
    "context_too_long", "deadline_exceeded", "draining", "empty_prompt", "insufficient_memory",
    "internal", "invalid_request", "model_failed", "numerical_error", "overloaded", "quarantined",
    "worker_died",
)  # fmt: skip
"""Error codes of requests. Their series start at 0, because ``increase()`` misses a first value."""
PAUSE_REASONS = ("memory", "restart")
ACTIONS = (
    "cache_miss", "evict", "first", "hold", "let_go", "load_refused", "malformed_call",
    "over_limit",
    "quarantine", "reclaim_precision", "reclaim_preempt", "reclaim_prefixes", "reclaim_spare",
    "reclaimed", "replay", "requeue", "segment_damaged", "start_level",
)  # fmt: skip
GLOBAL_ACTIONS = (
    "budget", "calm", "excess", "ignored_field", "prefix_store_off", "prefix_store_on",
    "segment_damaged", "tight", "violation",
)  # fmt: skip
"""Actions that do not concern a single model."""


def _from_zero(*names: str) -> Callable[[], Counter[str]]:
    return lambda: Counter(dict.fromkeys(names, 0))


@dataclass
class ModelCounters:
    """The counters of one model."""

    received: int = 0
    prompt_tokens: int = 0
    cache_tokens: Counter[str] = field(default_factory=_from_zero(*get_args(CacheReason)))
    """Prompt tokens by what the prefix cache did for them."""
    generated: int = 0
    finished: Counter[str] = field(default_factory=_from_zero(*get_args(FinishReason)))
    failed: Counter[str] = field(default_factory=_from_zero(*FAILURES))
    paused: Counter[str] = field(default_factory=_from_zero(*PAUSE_REASONS))
    resumed: int = 0
    actions: Counter[str] = field(default_factory=_from_zero(*ACTIONS))
    restarts: Counter[str] = field(default_factory=_from_zero(*CAUSES))
    loads: int = 0
    queue: Histogram = field(default_factory=lambda: Histogram(bounds.QUEUE_S))
    first: Histogram = field(default_factory=lambda: Histogram(bounds.FIRST_TOKEN_S))
    gaps: Histogram = field(default_factory=lambda: Histogram(bounds.TOKEN_S))
    whole: Histogram = field(default_factory=lambda: Histogram(bounds.REQUEST_S))
    segment_hits: int = 0
    segment_tokens: int = 0
    """Tokens that were read from the prefix store."""
    segment_saved_s: float = 0.0
    segment_bytes: int = 0
    """Bytes written to the prefix store."""
    segment_read_bytes: int = 0
    segments_refused: Counter[str] = field(default_factory=_from_zero(*get_args(Refusal)))
    worker: WorkerCounters = field(default_factory=WorkerCounters)


class Counters:
    """Counts observations; implements `actors.ports.Observe`."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        no_model = ModelCounters(
            failed=Counter(unknown_model=0), actions=Counter(dict.fromkeys(GLOBAL_ACTIONS, 0))
        )
        self.models = {NO_MODEL: no_model}
        self._knows = knows

    def __call__(self, observation: Observation) -> None:
        found = self.models.get(observation.model)
        _count(found or self._create(observation.model), observation)

    def name(self, model: str) -> str:
        return model if model in self.models else NO_MODEL

    def forget_failed_loads(self) -> None:
        """Drop models that are no longer known, were never ready and had no requests.

        What the governor did for them counts under ``""``.
        """
        for name in self._gone():
            if not (self.models[name].loads or self.models[name].received):
                self.models[NO_MODEL].actions.update(+self.models.pop(name).actions)

    def _gone(self) -> list[str]:
        return [name for name in self.models if name != NO_MODEL and not self._knows(name)]

    def _create(self, model: str) -> ModelCounters:
        if not self._knows(model):
            return self.models[NO_MODEL]
        gone = self._gone()
        for name in gone[: max(0, len(gone) - KEPT_AFTER_UNLOAD)]:
            del self.models[name]
        return self.models.setdefault(model, ModelCounters())


def _count(counters: ModelCounters, observation: Observation) -> None:  # noqa: C901, PLR0912 - one match
    match observation:
        case telemetry.TokensSent(tokens=tokens, first_s=first_s, gap_s=gap_s):
            counters.generated += tokens
            if gap_s is not None:  # the tokens of one event share its time equally
                counters.gaps.observe(gap_s / tokens, tokens)
            elif first_s is not None:
                counters.first.observe(first_s)
        case telemetry.StatsReported(life=life, stats=stats):
            counters.worker.update(life, stats)
        case telemetry.RequestArrived():
            counters.received += 1
        case telemetry.RequestAccepted(prompt_tokens=prompt_tokens):
            counters.prompt_tokens += prompt_tokens
        case telemetry.PromptCached(outcome=outcome):
            for part in outcome.parts:
                counters.cache_tokens[part.reason] += part.tokens
        case telemetry.RequestAdmitted(waited_s=waited_s):
            counters.queue.observe(waited_s)
        case telemetry.RequestPaused(reason=reason):
            counters.paused[reason] += 1
        case telemetry.RequestResumed():
            counters.resumed += 1
        case telemetry.RequestFinished(reason=reason, took_s=took_s):
            counters.finished[reason] += 1
            if took_s is not None:
                counters.whole.observe(took_s)
        case telemetry.RequestFailed(code=code):
            counters.failed[code] += 1
        case telemetry.ActionRecorded(kind=kind):
            counters.actions[kind] += 1
        case telemetry.SegmentWritten(nbytes=nbytes):
            counters.segment_bytes += nbytes
        case telemetry.SegmentRefused(reason=reason):
            counters.segments_refused[reason] += 1
        case telemetry.SegmentUsed(tokens=tokens, saved_s=saved_s, nbytes=nbytes):
            counters.segment_read_bytes += nbytes
            counters.segment_hits += 1
            counters.segment_tokens += tokens
            counters.segment_saved_s += max(0.0, saved_s)
        case telemetry.StateChanged(state="ready"):
            counters.loads += 1
        case telemetry.StateChanged(state="backoff", cause=cause):
            counters.restarts[cause] += 1
        case telemetry.StateChanged():
            pass
