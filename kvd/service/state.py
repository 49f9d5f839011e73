"""The state of a service, as the service manager reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["running", "starting", "stopping", "listening", "stopped", "failed"]


@dataclass(frozen=True)
class State:
    """The state of a service."""

    status: Status
    """``listening``: the first client starts the daemon."""
    details: str = ""
    pid: int | None = None
