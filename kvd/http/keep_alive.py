"""The field ``keep_alive`` of requests: how long the model stays loaded after them."""

from __future__ import annotations

from kvd.host.units import parse_keep_alive
from protocol.errors import InvalidRequest

KeepAlive = str | int | float
"""Seconds or a duration such as ``5m``; 0: unload when idle; negative: no limit."""


def seconds(given: KeepAlive | None) -> float | None:
    """Return the daemon's value; raises `InvalidRequest`."""
    if given is None:
        return None
    try:
        return parse_keep_alive(given)
    except ValueError as error:
        raise InvalidRequest(f"keep_alive: {error}", field="keep_alive") from None
