"""What is counted of moments (`actors.telemetry`), by model: the observer that a daemon has.

Each moment costs about a microsecond; there is one for each token that goes to a client. Only
models that are known have counters of their own: what is asked for under any other name counts for
none (``""``). A model that is gone keeps its counters for a while, so that its last ones are still
read; of those only the newest few are kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from actors import telemetry
from actors.machines.process_exit import CAUSES
from kvd.metrics import bounds
from kvd.metrics.histogram import Histogram
from kvd.metrics.lives import Lives
from protocol.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.telemetry import Observation

MOST_GONE = 16
"""Models that are gone whose counters are kept."""
NOBODY = ""
"""The model of what belongs to none."""
FAILURES = (
    "context_too_long", "deadline_exceeded", "draining", "empty_prompt", "insufficient_memory",
    "internal", "invalid_request", "model_failed", "numerical_error", "overloaded", "quarantined",
    "worker_died",
)  # fmt: skip
"""Codes that requests end with, there from the start: of what begins with 1 no rise is seen."""
PAUSE_REASONS = ("memory", "restart")
ACTIONS = (
    "evict", "first", "hold", "let_go", "load_refused", "quarantine", "reclaim_precision",
    "reclaim_preempt", "reclaim_prefixes", "reclaim_spare", "reclaimed", "replay", "requeue",
    "start_level",
)  # fmt: skip
"""What may be done to a model."""
ACTIONS_OF_ALL = ("budget", "calm", "excess", "tight", "violation")
"""What is about none of them alone."""


def _from_zero(*names: str) -> Callable[[], Counter[str]]:
    return lambda: Counter(dict.fromkeys(names, 0))


@dataclass
class OfModel:
    """What is counted of one model."""

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
    lives: Lives = field(default_factory=Lives)


class Tally:
    """Counts moments; call it with each (`actors.ports.Observe`)."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        nobody = OfModel(
            failed=Counter(unknown_model=0), actions=Counter(dict.fromkeys(ACTIONS_OF_ALL, 0))
        )
        self.models = {NOBODY: nobody}
        self._knows = knows
        self._hear: dict[type[Observation], Callable[[OfModel, Any], None]] = {
            telemetry.TokensSent: _spoke,
            telemetry.StatsReported: _counted,
            telemetry.RequestArrived: _arrived,
            telemetry.RequestAccepted: _taken,
            telemetry.RequestAdmitted: _begun,
            telemetry.RequestPaused: _paused,
            telemetry.RequestResumed: _resumed,
            telemetry.RequestFinished: _finished,
            telemetry.RequestFailed: _failed,
            telemetry.ActionRecorded: _acted,
            telemetry.StateChanged: _became,
        }

    def __call__(self, observation: Observation) -> None:
        """Count a moment."""
        found = self.models.get(observation.model)
        self._hear[type(observation)](found or self._of(observation.model), observation)

    def name(self, model: str) -> str:
        """Return the name that this model's things are counted under."""
        return model if model in self.models else NOBODY

    def _of(self, model: str) -> OfModel:
        if not self._knows(model):
            return self.models[NOBODY]
        gone = [name for name in self.models if name != NOBODY and not self._knows(name)]
        for name in gone[: max(0, len(gone) - MOST_GONE)]:
            del self.models[name]
        return self.models.setdefault(model, OfModel())


def _arrived(of: OfModel, _: telemetry.RequestArrived) -> None:
    of.received += 1


def _taken(of: OfModel, observation: telemetry.RequestAccepted) -> None:
    of.prompt_tokens += observation.prompt_tokens


def _begun(of: OfModel, observation: telemetry.RequestAdmitted) -> None:
    of.queue.observe(observation.waited_s)


def _spoke(of: OfModel, observation: telemetry.TokensSent) -> None:
    """Count tokens; several that came at once have taken as long each."""
    count = observation.tokens
    of.generated += count
    if observation.gap_s is not None:
        of.gaps.observe(observation.gap_s / count, count)
    elif observation.first_s is not None:
        of.first.observe(observation.first_s)


def _paused(of: OfModel, observation: telemetry.RequestPaused) -> None:
    of.paused[observation.reason] += 1


def _resumed(of: OfModel, _: telemetry.RequestResumed) -> None:
    of.resumed += 1


def _finished(of: OfModel, observation: telemetry.RequestFinished) -> None:
    of.finished[observation.reason] += 1
    if observation.took_s is not None:
        of.whole.observe(observation.took_s)


def _failed(of: OfModel, observation: telemetry.RequestFailed) -> None:
    of.failed[observation.code] += 1


def _acted(of: OfModel, observation: telemetry.ActionRecorded) -> None:
    of.actions[observation.kind] += 1


def _counted(of: OfModel, observation: telemetry.StatsReported) -> None:
    of.lives.hear(observation.life, observation.stats)


def _became(of: OfModel, observation: telemetry.StateChanged) -> None:
    if observation.state == "ready":
        of.loads += 1
    elif observation.state == "backoff":
        of.restarts[observation.cause] += 1
