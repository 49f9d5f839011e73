"""The variables KVD_PORT and KVD_BUDGET, which `kvd serve` uses without the same options."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.config.budget import parse_budget

PORT, BUDGET = "KVD_PORT", "KVD_BUDGET"
_MAX_PORT = 65535


def port_of(environment: Mapping[str, str]) -> int | None:
    """Return the port; None without one. Raises ValueError for a text that is no port.

    An address is no port either, but ignored: Kubernetes sets KVD_PORT to one in every pod if a
    Service is named kvd.
    """
    text = environment.get(PORT, "")
    if not text or text.startswith(("tcp://", "udp://")):
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 5 or int(text) > _MAX_PORT:
        raise ValueError(f"{PORT}: {text:.40} is no port; set 0 to {_MAX_PORT}, or unset it")
    return int(text)


def budget_of(environment: Mapping[str, str]) -> int | None:
    """Return the bytes of the budget; None without one. Raises ValueError if it is invalid."""
    if not (text := environment.get(BUDGET)):
        return None
    try:
        return parse_budget(text)
    except ValueError as error:
        raise ValueError(f"{BUDGET}: {error}") from error
