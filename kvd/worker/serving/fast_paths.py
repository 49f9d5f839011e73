"""Records which fast paths a load has chosen, and why it declined the others."""

from __future__ import annotations

from protocol.types import FastPath, FastPathCause, FastPathName


def used(name: FastPathName) -> FastPath:
    return FastPath(name=name, used=True)


def declined(name: FastPathName, cause: FastPathCause, reason: str) -> FastPath:
    return FastPath(name=name, used=False, cause=cause, reason=reason)


def failed(name: FastPathName, error: Exception) -> FastPath:
    """Return that a path raised an error: its type and its first line."""
    line = str(error).strip().split("\n")[0][:200]
    return declined(name, "error", f"{type(error).__name__}: {line}".removesuffix(": "))
