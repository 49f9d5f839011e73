"""Shell completion of models and settings: no error messages, and half a second at most."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import rich_click as click
from click.shell_completion import CompletionItem

from kvd.client import Client
from protocol.errors import KvdError
from protocol.model_source import EMBEDDED

_TIMEOUT_S = 0.5
"""Seconds to wait for a daemon that is busy or stopped."""


def model_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of known models, loaded or not, with this beginning."""
    home, socket = _value(context, "home"), _value(context, "socket")
    try:
        with Client(home=home, socket=socket, timeout_s=_TIMEOUT_S) as client:
            status = client.status()
    except (KvdError, OSError):
        return []
    names = [model.name for model in status.models] + status.unloaded
    return [name for name in names if name.startswith(incomplete)]


def paths(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete names of files; `click.Path` would check the path as well."""
    return [CompletionItem(incomplete, type="file")]


def model_sources(
    _: click.Context, __: click.Parameter, incomplete: str
) -> list[str] | list[CompletionItem]:
    """Return what `kvctl load` accepts with this beginning: names, Hub ids and folders."""
    from kvd.cli.local_models import in_hub_cache  # noqa: PLC0415 - only here

    names = [*EMBEDDED, *(model.source for model in in_hub_cache())]
    found = [name for name in names if name.startswith(incomplete)] + list(_folders(incomplete))
    # A folder of the working folder may be given without ./, as in `Qwen3/`.
    return found or [CompletionItem(incomplete, type="dir")]


def setting_keys(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from kvd.config.config import Config  # noqa: PLC0415 - only here
    from kvd.config.settings import flat  # noqa: PLC0415

    return [key for key in flat(Config()) if key.startswith(incomplete)]


def _folders(incomplete: str) -> Iterator[str]:
    parent, _, name = incomplete.rpartition("/")
    if not parent and not incomplete.startswith("/"):
        return
    with contextlib.suppress(OSError, RuntimeError):
        for path in sorted(Path(parent or "/").expanduser().iterdir()):
            if path.name.startswith(name) and path.is_dir():
                yield f"{parent}/{path.name}"


def _value(context: click.Context | None, option: str) -> str | None:
    """Return an option's value, as given after the command's name or before it."""
    while context is not None:
        if found := context.params.get(option):
            return str(found)
        context = context.parent
    return None
