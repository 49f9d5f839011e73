"""Changes one setting in the text of `config.toml`, keeping comments and order."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable

from kvd.config import config
from kvd.config.settings import with_value
from protocol.errors import ConfigError
from protocol.model_source import short_name


def edited_text(path: Path, key: str, value: Any) -> str:
    """Return the file's text with a new value, or without the setting if the value is None.

    Raises `ConfigError` if the file is invalid, before or after the change.
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
    table, field = _find_table(document, key, create=value is not None)
    if table is not None and value is not None:
        table[field] = value
    elif table is not None:
        table.pop(field, None)
    after = tomlkit.dumps(document)
    config.parse(after, str(path))
    return after


def _find_table(
    document: MutableMapping[str, Any], key: str, *, create: bool
) -> tuple[MutableMapping[str, Any] | None, str]:
    """Return the table of a key, None if it is missing or no table, and the key's name in it."""
    if key.startswith("models["):
        name, _, field = key.removeprefix("models[").rpartition("].")
        return _find_model(document, name, create=create), field
    *tables, field = key.split(".")
    place = document
    for name in tables:
        if name not in place and not create:
            return None, field
        if name not in place:
            inline = isinstance(place, InlineTable)
            place[name] = tomlkit.inline_table() if inline else tomlkit.table()
        place = place[name]
        if not isinstance(place, MutableMapping):
            return None, field
    return place, field


def _find_model(
    document: MutableMapping[str, Any], name: str, *, create: bool
) -> MutableMapping[str, Any] | None:
    models = document.get("models", [])
    for index, entry in enumerate(models):
        if isinstance(entry, str):
            if short_name(entry) == name and create:
                table: MutableMapping[str, Any] = tomlkit.inline_table()
                table["source"] = str(entry)
                models[index] = table
                created: MutableMapping[str, Any] = models[index]
                return created
        elif (entry.get("alias") or short_name(entry["source"])) == name:
            found: MutableMapping[str, Any] = entry
            return found
    return None
