"""What a trial says; as `kvd.doctor.finding.Finding` reads it."""

from __future__ import annotations

from typing import Literal

import msgspec


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict with numbers."""

    name: str
    verdict: Literal["ok", "skip", "warn", "fail"]
    said: str
    todo: str | None = None
    numbers: dict[str, float | int | str] = {}


REPORT = "attach the report to an issue"


def judged(name: str, said: str, numbers: dict[str, float | int | str], *, right: bool) -> Outcome:
    """Return that it is right, or that it is to be reported."""
    return Outcome(name, "ok" if right else "fail", said, None if right else REPORT, numbers)
