"""One setting of `config.toml` changed in its text, so that comments and order stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from actors.model_registry import short_name
from kvd.config import config
from kvd.config.settings import with_value
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from pathlib import Path


def edited_text(path: Path, key: str, value: Any) -> str:
    """Return the file's text with another value, or without it if that is None.

    Raises `ConfigError` if the file is wrong, or would be.
    """
    try:
        before = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        before = ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", key="") from error
    settings = config.parse(before, str(path))
    if value is not None:
        with_value(settings, key, value)
    try:
        document = tomlkit.parse(before)
    except TOMLKitError as error:
        raise ConfigError(f"{path} is not TOML: {error}", key="") from error
    table, field = _place(document, key, make=value is not None)
    if table is not None and value is not None:
        table[field] = value
    elif table is not None:
        table.pop(field, None)
    after = tomlkit.dumps(document)
    config.parse(after, str(path))
    return after


def _place(
    document: MutableMapping[str, Any], key: str, *, make: bool
) -> tuple[MutableMapping[str, Any] | None, str]:
    """Return the table that a key is in, and its name there; None where there is none."""
    if key.startswith("models["):
        name, _, field = key.removeprefix("models[").rpartition("].")
        return _model(document, name, make=make), field
    table, _, field = key.rpartition(".")
    if not table:
        return document, field
    if table not in document and make:
        document[table] = tomlkit.table()
    return document.get(table), field


def _model(
    document: MutableMapping[str, Any], name: str, *, make: bool
) -> MutableMapping[str, Any] | None:
    models = document.get("models", [])
    for at, entry in enumerate(models):
        if isinstance(entry, str):
            if short_name(entry) == name and make:
                models[at] = tomlkit.inline_table()
                models[at]["source"] = str(entry)
                found: MutableMapping[str, Any] = models[at]
                return found
        elif (entry.get("alias") or short_name(entry["source"])) == name:
            table: MutableMapping[str, Any] = entry
            return table
    return None
