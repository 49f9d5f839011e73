"""What a check says: a verdict, what it found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Verdict = Literal["ok", "skip", "warn", "fail"]
"""``warn``: it works, and could be better; ``fail``: something does not work."""
_ORDER: tuple[Verdict, ...] = ("skip", "ok", "warn", "fail")


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report."""

    name: str
    verdict: Verdict
    said: str
    todo: str | None = None
    """What to do; there is always something for ``warn`` and ``fail``."""
    numbers: dict[str, float | int | str] = {}
    """What was measured, in the units of its names."""


class Section(msgspec.Struct, frozen=True):
    """Findings of one kind."""

    title: str
    findings: list[Finding]


def ok(name: str, said: str, **numbers: float | str) -> Finding:
    """Return that all is well."""
    return Finding(name, "ok", said, numbers=dict(numbers))


def skip(name: str, said: str, **numbers: float | str) -> Finding:
    """Return that it does not apply here."""
    return Finding(name, "skip", said, numbers=dict(numbers))


def warn(name: str, said: str, todo: str, **numbers: float | str) -> Finding:
    """Return that it could be better."""
    return Finding(name, "warn", said, todo, dict(numbers))


def fail(name: str, said: str, todo: str, **numbers: float | str) -> Finding:
    """Return that it does not work."""
    return Finding(name, "fail", said, todo, dict(numbers))


def worst(sections: Iterable[Section]) -> Verdict:
    """Return the gravest verdict of all; nothing at all is ``ok``."""
    verdicts = [one.verdict for section in sections for one in section.findings]
    return max(["ok", *verdicts], key=_ORDER.index)
