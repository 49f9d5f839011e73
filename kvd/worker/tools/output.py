"""Output of the measuring tools: progress on stderr, one JSON object on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from protocol.errors import KvdError

Report = Callable[[str], None]


def progress(total: int) -> Report:
    """Return a function that numbers its messages, up to ``total``, and prints them."""
    numbers = count(1)

    def report(text: str) -> None:
        sys.stderr.write(f"{next(numbers)}/{total} {text}\n")
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
