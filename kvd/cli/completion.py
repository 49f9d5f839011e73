"""What a shell completes: models by name. Never complains, and never keeps the shell waiting."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvd.client import Client
from protocol.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.types import DaemonStatus

_PATIENCE_S = 0.5
"""A daemon that is busy or stopped must not hang a shell."""


def a_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of models that are known, loaded or not, and begin so."""
    status = _status(context)
    if status is None:
        return []
    names = [model.name for model in status.models] + status.unloaded
    return [name for name in names if name.startswith(incomplete)]


def a_loaded_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of models that are loaded, and begin so."""
    status = _status(context)
    if status is None:
        return []
    return [model.name for model in status.models if model.name.startswith(incomplete)]


def a_source(incomplete: str) -> list[str]:
    """Return what can be loaded and begins so: embedded models, the Hub's cache and folders."""
    from kvd.cli.local_models import embedded, in_hub_cache  # noqa: PLC0415 - only here

    names = [*embedded(), *(found.source for found in in_hub_cache())]
    return [name for name in names if name.startswith(incomplete)] + list(_folders(incomplete))


def a_setting(incomplete: str) -> list[str]:
    """Return the keys of the configuration that begin so."""
    from kvd.config.config import Config  # noqa: PLC0415 - only here
    from kvd.config.settings import flat  # noqa: PLC0415

    return [key for key in flat(Config()) if key.startswith(incomplete)]


def _folders(incomplete: str) -> Iterator[str]:
    head, _, tail = incomplete.rpartition("/")
    if not head and not incomplete.startswith("/"):
        return
    with contextlib.suppress(OSError, RuntimeError):
        for one in sorted(Path(head or "/").expanduser().iterdir()):
            if one.name.startswith(tail) and one.is_dir():
                yield f"{head}/{one.name}"


def _status(context: typer.Context) -> DaemonStatus | None:
    home, socket = _said(context, "home"), _said(context, "socket")
    try:
        with Client(home=home, socket=socket, timeout_s=_PATIENCE_S) as client:
            return client.status()
    except (KvdError, OSError):
        return None


def _said(context: Any, option: str) -> str | None:
    """Return what was said of an option after the command, or before it."""
    while context is not None:
        if found := context.params.get(option):
            return str(found)
        context = context.parent
    return None
