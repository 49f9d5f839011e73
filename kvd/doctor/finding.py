"""The result of a check: verdict, observation and advice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Verdict = Literal["ok", "skip", "warn", "fail"]
"""``warn``: works, but could be better; ``fail``: does not work."""
_ORDER: tuple[Verdict, ...] = ("skip", "ok", "warn", "fail")
REPORT = "attach the report to an issue"
"""Advice after a failed trial of the selftest."""


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report."""

    name: str
    verdict: Verdict
    observed: str
    """What the check found, for a person."""
    advice: str | None = None
    """What to do; always present for ``warn`` and ``fail``."""
    numbers: dict[str, float | int | str] = {}
    """Measured values, under names that end with the unit."""


class Section(msgspec.Struct, frozen=True):
    """A group of findings."""

    title: str
    findings: list[Finding]


def ok(name: str, observed: str, **numbers: float | str) -> Finding:
    return Finding(name, "ok", observed, numbers=dict(numbers))


def skip(name: str, observed: str, **numbers: float | str) -> Finding:
    return Finding(name, "skip", observed, numbers=dict(numbers))


def warn(name: str, observed: str, advice: str, **numbers: float | str) -> Finding:
    return Finding(name, "warn", observed, advice, dict(numbers))


def fail(name: str, observed: str, advice: str, **numbers: float | str) -> Finding:
    return Finding(name, "fail", observed, advice, dict(numbers))


def worst(sections: Iterable[Section]) -> Verdict:
    """Return the worst verdict; ``ok`` without findings."""
    verdicts = [finding.verdict for section in sections for finding in section.findings]
    return max(["ok", *verdicts], key=_ORDER.index)
