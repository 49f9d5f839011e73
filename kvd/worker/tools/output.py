"""Output of the measuring tools: progress on stderr, one JSON object on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from protocol.errors import KvdError


class Report(Protocol):
    """Announces the next step of a measurement."""

    def __call__(self, text: str, total: int | None = None, /) -> None:
        """Announce a step; ``total``: number of all steps, if it has become known."""


def progress(total: int) -> Report:
    """Return a function that numbers its messages, up to ``total``, and prints them."""
    done = 0

    def report(text: str, changed: int | None = None, /) -> None:
        nonlocal done, total
        done += 1
        total = max(done, changed or total)
        sys.stderr.write(f"{done}/{total} {text}\n")
        sys.stderr.flush()

    return report


def print_result(run: Callable[[], dict[str, Any]]) -> None:
    """Print the result, or ``{"error": …}``, and exit with status 0 or 1."""
    status = 0
    try:
        result = run()
    except KvdError as error:
        result, status = {"error": error.info()}, 1
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.exit(status)
