"""Timeouts of the `[watchdog]` settings: the longest silence in each phase, and time to exit."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.fields import PositiveSeconds
from protocol.worker import Phase

WatchedPhase = Literal["spawning", "loading"] | Phase


class WatchdogTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The longest silence in each phase, in seconds. The defaults suit a slow machine."""

    spawning_s: PositiveSeconds = 60.0
    """From the start of the process to its first report. Covers Python and MLX from a slow disk."""
    loading_s: PositiveSeconds = 600.0
    """Without progress of the load. Covers one shard of a large model from a slow disk."""
    idle_s: PositiveSeconds = 120.0
    """While the worker waits for requests, a grant or a time slice. It sends counters every few
    seconds."""
    tokenize_s: PositiveSeconds = 300.0
    """While the worker tokenizes a prompt. Covers the largest prompt that fits into a frame."""
    prefill_s: PositiveSeconds = 600.0
    """For one pass, and compiling its kernels. 256 tokens of an 8B model on a CPU take 80 s."""
    decode_s: PositiveSeconds = 300.0
    """For one step. Some steps are traced or compiled first."""
    flush_s: PositiveSeconds = 300.0
    """While the worker writes all full pages of all rows and finishes earlier launches."""
    pools_s: PositiveSeconds = 300.0
    """For copying one slice of pages, or all pools once."""
    asked_s: PositiveSeconds = 10.0
    """Between asking the worker to exit and sending SIGTERM."""
    halted_s: PositiveSeconds = 2.0
    """Like `asked_s`, if the worker must not finish its requests."""
    terminated_s: PositiveSeconds = 5.0
    """Between SIGTERM and SIGKILL, and between SIGKILLs: a process in a driver call exits late."""

    def of(self, phase: WatchedPhase) -> float:
        return getattr(self, f"{phase}_s")  # type: ignore[no-any-return]
