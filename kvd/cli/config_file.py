"""Changes one setting of `config.toml`, keeping comments and order."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import InlineTable

from kvd.config import config
from kvd.config.config import Config
from kvd.config.settings import flat, keys_in, value_of, with_value
from protocol import atomic_file, paths
from protocol.errors import ConfigError
from protocol.model_source import short_name


def save(path: Path, key: str, value: Any, *, new: bool = False) -> None:
    """Change one setting of the file, or remove it with None; ``new``: only if it is not set.

    Changes by several commands at the same time exclude each other. Raises `ConfigError` if the
    file is invalid, before or after the change, or cannot be written; the file is unchanged then.
    """
    try:
        with _locked(path):
            _replace(paths.resolved(path), edited_text(path, key, value, new=new))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; make its folder writable and free "
            "disk space, or repeat the command without --save",
            key="",
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on the file's folder. The file cannot be locked, because it is replaced."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(
        paths.resolved(path).parent, os.O_RDONLY
    )  # a symbolic link's target is replaced
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(target: Path, text: str) -> None:
    """Replace the file's content atomically; it keeps its mode."""
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    atomic_file.write(target, text.encode(), mode=mode)


def edited_text(path: Path, key: str, value: Any, *, new: bool = False) -> str:
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
    if new and value_of(settings, key) is not None:
        raise ConfigError(f"{key} is set already; choose another name", key=key)
    wanted = None if value is None else with_value(settings, key, value)
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
    if not _is_changed(after, key, wanted):
        raise ConfigError(f"kvctl cannot change {key} in {path}; edit the file yourself", key=key)
    return after


def _is_changed(text: str, key: str, wanted: Config | None) -> bool:
    """Return whether a text has the wanted settings, or with None, whether the key is not set.

    tomlkit damages some files, such as ones with the dotted keys of a table in several places.
    """
    try:
        found = config.parse(text)
    except ConfigError:
        if wanted is None:
            raise  # the setting is necessary
        return False
    if wanted is not None:
        return flat(found) == flat(wanted)
    return key not in keys_in(text) and (key in flat(found) or value_of(found, key) is None)


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
