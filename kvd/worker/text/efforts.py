"""Reasoning efforts: which values a chat template knows, and the nearest one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

ORDER = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values that clients send, in ascending order."""
_USUAL = ("low", "medium", "high")
_UNKNOWN = "probe-effort"


def find_efforts(plain: str, render: Callable[[str], str]) -> list[str]:
    """Return the values that change a prompt, in ascending order.

    ``plain``: the prompt without a value. ``render`` returns the prompt with one; empty: refused.
    """
    prompts = {value: found for value in ORDER if (found := render(value))}
    if not plain or len({plain, *prompts.values()}) < 2:
        return []
    unknown = render(_UNKNOWN)
    if _UNKNOWN in unknown:  # the template copies any value
        return [value for value in _USUAL if value in prompts]
    known = [value for value in prompts if prompts[value] != unknown]
    return known if len(known) > 1 else list(prompts)


def nearest_effort(value: str, known: Sequence[str]) -> str:
    """Return the known effort nearest to ``value``; of two, the higher one."""
    if value in known:
        return value
    at = ORDER.index(value) if value in ORDER else ORDER.index("medium")
    return min(reversed(known), key=lambda one: abs(ORDER.index(one) - at))
