"""The callback that the loop passes to `Engine.watch`, which may change at any time."""

from __future__ import annotations

from kvd.worker.engine import OnPhase, ignore_phase
from protocol.worker import Phase


class PhaseListener:
    """Calls ``on_phase`` before each phase of a step."""

    def __init__(self) -> None:
        self.on_phase: OnPhase = ignore_phase

    def __call__(self, phase: Phase) -> None:
        self.on_phase(phase)
