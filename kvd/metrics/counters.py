"""Counts the actors' observations (`actors.telemetry`) by model.

An observation costs about a microsecond, and each token sent to a client is one. Only known models
have their own counters; all other names count under ``""``. An unloaded model that is no longer
known keeps its counters until `KEPT_AFTER_UNLOAD` others have followed, so that its last values are
still scraped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from actors import telemetry
from actors.machines.process_exit import CAUSES
from kvd.metrics import bounds
from kvd.metrics.histogram import Histogram
from kvd.metrics.worker_counters import WorkerCounters
from protocol.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.telemetry import Observation

KEPT_AFTER_UNLOAD = 16
"""Number of unknown models whose counters are kept."""
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
    "evict", "first", "hold", "let_go", "load_refused", "quarantine", "reclaim_precision",
    "reclaim_preempt", "reclaim_prefixes", "reclaim_spare", "reclaimed", "replay", "requeue",
    "start_level",
)  # fmt: skip
"""Governor actions on one model."""
GLOBAL_ACTIONS = ("budget", "calm", "excess", "tight", "violation")
"""Governor actions that do not concern a single model."""


def _from_zero(*names: str) -> Callable[[], Counter[str]]:
    return lambda: Counter(dict.fromkeys(names, 0))


@dataclass
class ModelCounters:
    """The counters of one model."""

    received: int = 0
    prompt_tokens: int = 0
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
    worker: WorkerCounters = field(default_factory=WorkerCounters)


class Counters:
    """Counts observations; implements `actors.ports.Observe`."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        no_model = ModelCounters(
            failed=Counter(unknown_model=0), actions=Counter(dict.fromkeys(GLOBAL_ACTIONS, 0))
        )
        self.models = {NO_MODEL: no_model}
        self._knows = knows
        self._count: dict[type[Observation], Callable[[ModelCounters, Any], None]] = {
            telemetry.TokensSent: _tokens_sent,
            telemetry.StatsReported: _stats_reported,
            telemetry.RequestArrived: _request_arrived,
            telemetry.RequestAccepted: _request_accepted,
            telemetry.RequestAdmitted: _request_admitted,
            telemetry.RequestPaused: _request_paused,
            telemetry.RequestResumed: _request_resumed,
            telemetry.RequestFinished: _request_finished,
            telemetry.RequestFailed: _request_failed,
            telemetry.ActionRecorded: _action_recorded,
            telemetry.StateChanged: _state_changed,
        }

    def __call__(self, observation: Observation) -> None:
        found = self.models.get(observation.model)
        self._count[type(observation)](found or self._create(observation.model), observation)

    def name(self, model: str) -> str:
        """Return the name under which a model is counted."""
        return model if model in self.models else NO_MODEL

    def _create(self, model: str) -> ModelCounters:
        if not self._knows(model):
            return self.models[NO_MODEL]
        gone = [name for name in self.models if name != NO_MODEL and not self._knows(name)]
        for name in gone[: max(0, len(gone) - KEPT_AFTER_UNLOAD)]:
            del self.models[name]
        return self.models.setdefault(model, ModelCounters())


def _request_arrived(counters: ModelCounters, _: telemetry.RequestArrived) -> None:
    counters.received += 1


def _request_accepted(counters: ModelCounters, observation: telemetry.RequestAccepted) -> None:
    counters.prompt_tokens += observation.prompt_tokens


def _request_admitted(counters: ModelCounters, observation: telemetry.RequestAdmitted) -> None:
    counters.queue.observe(observation.waited_s)


def _tokens_sent(counters: ModelCounters, observation: telemetry.TokensSent) -> None:
    """Count tokens; tokens of one event share its time equally."""
    count = observation.tokens
    counters.generated += count
    if observation.gap_s is not None:
        counters.gaps.observe(observation.gap_s / count, count)
    elif observation.first_s is not None:
        counters.first.observe(observation.first_s)


def _request_paused(counters: ModelCounters, observation: telemetry.RequestPaused) -> None:
    counters.paused[observation.reason] += 1


def _request_resumed(counters: ModelCounters, _: telemetry.RequestResumed) -> None:
    counters.resumed += 1


def _request_finished(counters: ModelCounters, observation: telemetry.RequestFinished) -> None:
    counters.finished[observation.reason] += 1
    if observation.took_s is not None:
        counters.whole.observe(observation.took_s)


def _request_failed(counters: ModelCounters, observation: telemetry.RequestFailed) -> None:
    counters.failed[observation.code] += 1


def _action_recorded(counters: ModelCounters, observation: telemetry.ActionRecorded) -> None:
    counters.actions[observation.kind] += 1


def _stats_reported(counters: ModelCounters, observation: telemetry.StatsReported) -> None:
    counters.worker.update(observation.life, observation.stats)


def _state_changed(counters: ModelCounters, observation: telemetry.StateChanged) -> None:
    if observation.state == "ready":
        counters.loads += 1
    elif observation.state == "backoff":
        counters.restarts[observation.cause] += 1
