"""The outcome of a check, which `kvd.doctor.finding.Finding` decodes."""

from __future__ import annotations

from typing import Literal

import msgspec


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A verdict with numbers."""

    name: str
    verdict: Literal["ok", "skip", "warn", "fail"]
    observed: str
    advice: str | None = None
    numbers: dict[str, float | int | str] = {}


REPORT = "attach the report to an issue"


def outcome_of(name: str, text: str, *, right: bool, **numbers: float | str) -> Outcome:
    """Return ``ok`` if ``right``, otherwise a failure that the user should report."""
    return Outcome(name, "ok" if right else "fail", text, None if right else REPORT, dict(numbers))
