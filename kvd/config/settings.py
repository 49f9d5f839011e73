"""All settings by key, with the origin of each value, and changes through the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from kvd.config import config
from kvd.config.budget import parse_budget
from kvd.config.config import Config, ModelEntry
from kvd.config.reload import LIVE, LIVE_OF_A_MODEL, by_name, is_overridden
from protocol.errors import ConfigError, InvalidRequest
from protocol.model_source import short_name
from protocol.settings import Changed, Origin, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from pathlib import Path

    from kvd.config.options import Options
    from kvd.config.reload import Reloader

_TABLES = frozenset(
    key for key in Config.__struct_fields__ if isinstance(getattr(Config(), key), msgspec.Struct)
)
_MODEL_FIELDS = tuple(field for field in ModelEntry.__struct_fields__ if field != "alias")


def flat(settings: Config) -> dict[str, Any]:
    """Return all settings by key, as values that JSON can encode."""
    found: dict[str, Any] = {}
    for key in Config.__struct_fields__:
        value = getattr(settings, key)
        if key == "models":
            for name, entry in by_name(settings).items():
                found |= {f"models[{name}].{at}": getattr(entry, at) for at in _MODEL_FIELDS}
        elif key in _TABLES:
            found |= {f"{key}.{at}": getattr(value, at) for at in value.__struct_fields__}
        else:
            found[key] = value
    return {key: msgspec.to_builtins(value) for key, value in found.items()}


def default_of(key: str) -> Any:
    if key.startswith("models["):
        field = key.rpartition("].")[2]
        return None if field == "source" else msgspec.to_builtins(getattr(ModelEntry(""), field))
    return flat(Config())[key]


def may_change_live(key: str) -> bool:
    if key.startswith("models["):
        return key.rpartition("].")[2] in LIVE_OF_A_MODEL
    return key in LIVE


def keys_in(text: str) -> set[str]:
    keys: set[str] = set()
    for key, value in config.read_toml(text).items():
        if key == "models":
            for entry in value:
                table = {"source": entry} if isinstance(entry, str) else entry
                name = table.get("alias") or short_name(table.get("source", ""))
                keys |= {f"models[{name}].{field}" for field in table}
        elif isinstance(value, dict):
            keys |= {f"{key}.{field}" for field in value}
        else:
            keys.add(key)
    return keys


def value_of(settings: Config, key: str) -> Any:
    """Return the value of a setting, or of one entry such as ``http.keys.me``; None without one."""
    known = flat(settings)
    table, _, entry = key.rpartition(".")
    return known[table].get(entry) if _is_mapping(known, table) else known.get(key)


def _is_mapping(known: Mapping[str, Any], key: str) -> bool:
    return not key.startswith("models[") and isinstance(known.get(key), dict)


def with_value(settings: Config, key: str, value: Any) -> Config:
    """Return the configuration with a changed value; raises `ConfigError` if it is invalid.

    The key may also name one entry of a table, such as ``http.keys.me``; None removes it.
    """
    known = flat(settings)
    table, _, field = key.rpartition(".")
    if key not in known and not _is_mapping(known, table):
        raise ConfigError(_unknown(key, known), key=key)
    data: dict[str, Any] = msgspec.to_builtins(settings)
    if key.startswith("models["):
        name, _, field = key.removeprefix("models[").rpartition("].")
        data["models"] = [msgspec.to_builtins(entry) for entry in settings.entries]
        for entry, model in zip(settings.entries, data["models"], strict=True):
            if entry.name == name:
                model[field] = value
    else:
        place = data
        for name in filter(None, table.split(".")):
            place = place[name]
        place[field] = value
        if value is None:  # absent, because None is no entry of a table
            del place[field]
    return config.convert(data)


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    if key.startswith("models["):
        name = key.removeprefix("models[").partition("]")[0]
        if not any(setting.startswith(f"models[{name}].") for setting in known):
            return (
                f"the configuration has no model {name!r}; for a model that was loaded by hand, "
                "use `kvctl pin`, or load it again with other options"
            )
    ending = f".{key.rpartition('.')[2]}"
    near = [name for name in known if f".{name}".endswith(ending) or name.startswith(f"{key}.")]
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else ""
    return f"there is no setting {key!r}{hint}"


def table(
    current: Config, file: Path, options: Options | None = None, live: frozenset[str] = frozenset()
) -> list[Setting]:
    """Return all settings with their current values and those of the file.

    ``live``: the keys that were changed through the protocol.
    """
    in_file, upcoming = _read(file)
    upcoming_values = flat(upcoming) if upcoming is not None else {}
    found = []
    for key, value in flat(current).items():
        differs = upcoming is not None and upcoming_values.get(key) != value
        default = default_of(key)
        is_default = key not in in_file or (differs and value == default)
        origin: Origin = "default" if is_default else "file"
        if options is not None and is_overridden(key, options):
            origin = "command_line"
        if key in live and differs:
            origin = "live"
        found.append(
            Setting(
                key=key,
                value=_shown(key, value),
                default=_shown(key, default),
                origin=origin,
                live=may_change_live(key),
                pending=differs and origin in {"file", "default"} and key in upcoming_values,
                next=_shown(key, upcoming_values.get(key)) if differs else None,
            )
        )
    return found


def _shown(key: str, value: Any) -> Any:
    """Return a value for display; for API keys, only their names and not their hashes."""
    return sorted(value or ()) if key == "http.keys" else value


def _read(file: Path) -> tuple[set[str], Config | None]:
    """Return the keys and values of a file; nothing if it is invalid (see `kvctl doctor`)."""
    try:
        upcoming = config.load(file)  # first, since `keys_in` needs valid types
        return keys_in(file.read_text(encoding="utf-8")) if file.exists() else set(), upcoming
    except (ConfigError, OSError, ValueError):
        return set(), None


class LiveSettings:
    """The settings of a running daemon."""

    def __init__(
        self,
        options: Options,
        reloader: Reloader,
        reload: Callable[[], Coroutine[Any, Any, list[Changed]]] | None = None,
    ) -> None:
        """``reload`` reloads the file and reports it; default: only `Reloader.reload`."""
        self._options = options
        self._reloader = reloader
        self._reload = reload or reloader.reload
        self._live: set[str] = set()

    @property
    def table(self) -> list[Setting]:
        file = self._options.home.config
        return table(self._reloader.settings, file, self._options, frozenset(self._live))

    async def change(self, values: Mapping[str, Any]) -> list[Changed]:
        """Change settings by key as far as possible; None restores the value of the file.

        Raises `ConfigError` for an invalid key or value, before anything changes.
        """
        if "models" in values:
            raise InvalidRequest("change models with load and unload", field="settings")
        async with self._reloader.lock:
            return await self._change(values)

    async def _change(self, values: Mapping[str, Any]) -> list[Changed]:
        reloader = self._reloader
        wanted, file = reloader.settings, config.load(self._options.home.config)
        for key, value in values.items():
            wanted = with_value(wanted, key, value_of(file, key) if value is None else value)
        changes: list[Changed] = []
        if "budget" in values and is_overridden("budget", self._options):
            # A live change has precedence over the command line.
            changes.append(Changed("budget", reloader.settings.budget, wanted.budget))
            await reloader.set_budget(wanted)
            reloader.settings = replace(reloader.settings, budget=wanted.budget)
        before = flat(reloader.settings)
        applied = {change.key: change.takes_effect for change in await reloader.apply(wanted)}
        changes += [
            Changed(key, _shown(key, before.get(key)), _shown(key, after), takes_effect)
            for key, after in flat(wanted).items()
            if after != before.get(key)
            and (takes_effect := applied.get(key) or applied.get(key.rpartition(".")[0]))
            is not None
        ]
        self._live |= {change.key for change in changes if change.takes_effect == "now"}
        return changes

    async def reload(self) -> list[Changed]:
        return await self._reload()

    async def budget_changed(self, total_bytes: int) -> None:
        """Record a budget that the caller sets in the governor immediately afterwards.

        Raises `ConfigError` below the minimum.
        """
        try:
            parse_budget(total_bytes)
        except ValueError as error:
            raise ConfigError(f"budget: {error}", key="budget") from error
        async with self._reloader.lock:
            self._reloader.settings = replace(self._reloader.settings, budget=total_bytes)
            self._live.add("budget")
