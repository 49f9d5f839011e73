"""The reason of a request with several choices."""

from __future__ import annotations

from collections.abc import Collection

from protocol.messages import FinishReason

_PRECEDENCE: tuple[FinishReason, ...] = ("cancelled", "length", "stop")


def combined_reason(reasons: Collection[FinishReason]) -> FinishReason:
    """Return the reason of a request from those of its choices."""
    return next(reason for reason in _PRECEDENCE if reason in reasons)
