"""Every setting by its key, where its value comes from, and changes of it while the daemon runs.

`kvd.config.config` has the shape of it all, `kvd.config.reload` what may change live and how it does.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from actors.registry_state import short_name
from kvd.config import config
from kvd.config.config import Config, ModelEntry
from kvd.config.reload import LIVE, LIVE_OF_A_MODEL, named, overlaid
from kvd.host.units import parse_bytes
from protocol.errors import ConfigError, InvalidRequest
from protocol.settings import Changed, Origin, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvd.config.options import Options
    from kvd.config.reload import Reloader, Running

_TABLES = frozenset(
    key for key in Config.__struct_fields__ if isinstance(getattr(Config(), key), msgspec.Struct)
)
_MODEL_FIELDS = tuple(field for field in ModelEntry.__struct_fields__ if field != "alias")
_DEFAULT_ENTRY = ModelEntry("")


def flat(settings: Config) -> dict[str, Any]:
    """Return all settings by key, as values that travel."""
    found: dict[str, Any] = {}
    for key in Config.__struct_fields__:
        value = getattr(settings, key)
        if key == "models":
            for name, entry in named(settings).items():
                found |= {f"models[{name}].{at}": getattr(entry, at) for at in _MODEL_FIELDS}
        elif key in _TABLES:
            found |= {f"{key}.{at}": getattr(value, at) for at in value.__struct_fields__}
        else:
            found[key] = value
    return {key: msgspec.to_builtins(value) for key, value in found.items()}


def default_of(key: str) -> Any:
    """Return what holds where nobody says anything."""
    if key.startswith("models["):
        field = key.rpartition("].")[2]
        return None if field == "source" else msgspec.to_builtins(getattr(_DEFAULT_ENTRY, field))
    return flat(Config())[key]


def may_change_live(key: str) -> bool:
    """Return whether a change holds at once."""
    if key.startswith("models["):
        return key.rpartition("].")[2] in LIVE_OF_A_MODEL
    return key in LIVE


def said_in(text: str) -> set[str]:
    """Return the keys that a file in TOML says."""
    said: set[str] = set()
    for key, value in tomllib.loads(text).items():
        if key == "models":
            for entry in value:
                table = {"source": entry} if isinstance(entry, str) else entry
                name = table.get("alias") or short_name(table.get("source", ""))
                said |= {f"models[{name}].{field}" for field in table}
        elif isinstance(value, dict):
            said |= {f"{key}.{field}" for field in value}
        else:
            said.add(key)
    return said


def with_value(settings: Config, key: str, value: Any) -> Config:
    """Return the configuration with another value; raises `ConfigError` for a bad key or value."""
    known = flat(settings)
    if key not in known:
        raise ConfigError(_unknown(key, known), key=key)
    data: dict[str, Any] = msgspec.to_builtins(settings)
    if key.startswith("models["):
        name, _, field = key.removeprefix("models[").rpartition("].")
        entries = [(entry.alias or short_name(entry.source), entry) for entry in settings.entries]
        data["models"] = [
            {**msgspec.to_builtins(entry), **({field: value} if its == name else {})}
            for its, entry in entries
        ]
    else:
        table, _, field = key.rpartition(".")
        (data[table] if table else data)[field] = value
    return config.convert(data, "this setting")


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    if key.startswith("models["):
        name = key.removeprefix("models[").partition("]")[0]
        if not any(one.startswith(f"models[{name}].") for one in known):
            return (
                f"no model {name!r} is in the configuration; one that was loaded by hand is "
                "changed by `kvctl pin`, or loaded anew with other options"
            )
    last = key.rpartition(".")[2]
    near = [one for one in known if one.rpartition(".")[2] == last or one.startswith(f"{key}.")]
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else ""
    return f"there is no setting {key!r}{hint}"


def table(
    holding: Config, file: Path, options: Options | None = None, live: frozenset[str] = frozenset()
) -> list[Setting]:
    """Return every setting, with what the file says beside what holds."""
    said, next_up = _in(file)
    coming = flat(next_up) if next_up is not None else {}
    found = []
    for key, value in flat(holding).items():
        differs = next_up is not None and coming.get(key) != value
        default = default_of(key)
        origin: Origin = "default" if key not in said or (differs and value == default) else "file"
        if options is not None and overlaid(key, options):
            origin = "command_line"
        if key in live and differs:
            origin = "live"
        found.append(
            Setting(
                key=key,
                value=_told(key, value),
                default=_told(key, default),
                origin=origin,
                live=may_change_live(key),
                pending=differs and origin in {"file", "default"} and key in coming,
                next=_told(key, coming.get(key)) if differs else None,
            )
        )
    return found


def _told(key: str, value: Any) -> Any:
    """Return what is told of a value: of API keys whose they are, and not their hashes."""
    return sorted(value or ()) if key == "http.keys" else value


def _in(file: Path) -> tuple[set[str], Config | None]:
    """Return what a file says; nothing of one that is wrong: `kvctl doctor` says how."""
    try:
        return (said_in(file.read_text(encoding="utf-8")) if file.exists() else set()), config.load(
            file
        )
    except (ConfigError, OSError, ValueError):
        return set(), None


class LiveSettings:
    """The settings of a daemon that runs."""

    def __init__(
        self, options: Options, reloader: Reloader, running: Running, budget: Callable[[], int]
    ) -> None:
        """`budget`: what holds where the configuration says nothing."""
        self._options = options
        self._reloader = reloader
        self._running = running
        self._default_budget = budget
        self._live: set[str] = set()

    @property
    def table(self) -> list[Setting]:
        """Every setting as it holds now."""
        file = self._options.home.config
        return table(self._reloader.settings, file, self._options, frozenset(self._live))

    async def change(self, values: Mapping[str, Any]) -> list[Changed]:
        """Let these values hold as far as they can, all of them or none; None: what the file says.

        Raises `ConfigError` for a key or value that is none.
        """
        if "models" in values:
            raise InvalidRequest("models are changed by load and unload", field="settings")
        async with self._reloader.turn:
            return await self._change(values)

    async def _change(self, values: Mapping[str, Any]) -> list[Changed]:
        reloader = self._reloader
        wanted, file = reloader.settings, config.load(self._options.home.config)
        for key, value in values.items():
            wanted = with_value(wanted, key, flat(file).get(key) if value is None else value)
        changes: list[Changed] = []
        if "budget" in values and overlaid("budget", self._options):
            # Whoever asks now knows better than the command line of then.
            changes.append(Changed("budget", reloader.settings.budget, wanted.budget))
            await self._set_budget(wanted)
            reloader.settings = replace(reloader.settings, budget=wanted.budget)
        before = flat(reloader.settings)
        takes_effect = {one.key: one.takes_effect for one in await reloader.take(wanted)}
        changes += [
            Changed(key, _told(key, before.get(key)), _told(key, after), held)
            for key, after in flat(wanted).items()
            if after != before.get(key)
            and (held := takes_effect.get(key) or takes_effect.get(key.rpartition(".")[0]))
            is not None
        ]
        self._live |= {one.key for one in changes if one.takes_effect == "now"}
        return changes

    async def budget_changed(self, total_bytes: int) -> None:
        """Note what a client tells the governor next, without a pause: others come after it."""
        async with self._reloader.turn:
            self._reloader.settings = replace(self._reloader.settings, budget=total_bytes)
            self._live.add("budget")

    async def _set_budget(self, wanted: Config) -> None:
        said = wanted.budget
        total = parse_bytes(said) if isinstance(said, str) else said
        await self._running.set_budget(self._default_budget() if total is None else total)
