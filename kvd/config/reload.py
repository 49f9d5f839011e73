"""Changes the configuration while the daemon runs. An invalid configuration changes nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from msgspec.structs import replace

from actors.status import KnownModel
from kvd.config import config
from kvd.config.config import Config, ModelEntry, PrefixStoreSettings
from kvd.config.models_dir import models_dir, sources_in
from kvd.config.sources import absolute
from kvd.host import blas, logs
from protocol.settings import Changed, TakesEffect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from actors.machines.prefix_store_events import StoreLimits
    from kvd.config.http import HttpSettings
    from kvd.config.options import Options

_SECTIONS = ("http", "prefix_store")
LIVE_OF_HTTP = ("keys", "hosts", "origins")
LIVE = frozenset(
    {
        "budget",
        "drain_timeout_s",
        "log_level",
        "models",
        "models_dir",
        *(f"prefix_store.{key}" for key in PrefixStoreSettings.LIMITS),
        *(f"http.{key}" for key in LIVE_OF_HTTP),
    }
)
"""Keys of `config.toml` that take effect at once; all others need a restart of the daemon."""
LIVE_OF_A_MODEL = frozenset({"priority", "pinned", "idle_ttl_s", "weight", "load"})
"""Keys of a model that take effect at once. A change of another key takes effect only if the model
is unloaded when the configuration is applied."""


class RunningSystem(Protocol):
    """The part of `actors.system.System` that settings change."""

    async def set_budget(self, total_bytes: int) -> None:
        """Limit the sum of all grants."""

    async def add_configured_model(
        self, name: str, known: KnownModel, policy: Mapping[str, Any]
    ) -> bool:
        """Add a model of the configuration to the registry, and set these fields of its policy.

        Returns False if the model is loaded with other settings, which it then keeps.
        """

    def limit_prefix_store(self, limits: StoreLimits) -> None:
        """Set the limits of the prefix store."""

    async def set_found_models(self, sources: Mapping[str, str]) -> None:
        """Set the models of the models folder: their sources, by name."""

    async def remove_configured_model(self, name: str) -> None:
        """Remove a model of the configuration from the registry; a loaded model stays loaded."""


class Reloader:
    """The current configuration, and its changes."""

    def __init__(
        self,
        options: Options,
        settings: Config,
        running: RunningSystem,
        *,
        default_budget: Callable[[], int],
        load: Callable[[ModelEntry], None],
        apply_http: Callable[[HttpSettings], None] = lambda _: None,
    ) -> None:
        """``load`` loads a model in the background; ``apply_http`` changes the HTTP server."""
        self._options = options
        self._running = running
        self._default_budget = default_budget
        self._load = load
        self._apply_http = apply_http
        self._log = structlog.get_logger("kvd.config.reload")
        self.lock = asyncio.Lock()
        """Held while ``settings`` are read and changed, so that no change is lost."""
        self.settings = settings
        self.pending: tuple[str, ...] = ()
        """Keys of the changes that are not in effect yet."""

    async def reload(self) -> list[Changed]:
        """Read and apply the file; raises `ConfigError` before anything changes."""
        async with self.lock:
            changes = await self.apply(config.load(self._options.home.config))
            if not any(change.key == "models_dir" for change in changes):
                await self._find_models()
            return changes

    async def apply(self, wanted: Config) -> list[Changed]:
        """Apply this configuration as far as possible; return the changes.

        The caller must hold the `lock`, and must have taken it before it read the settings from
        which it derived ``wanted``.
        """
        assert self.lock.locked(), "changes settings without the lock"
        blas.choose(wanted.blas)  # raises for a value that would break the next start
        in_sections = self._change_section("http", wanted)  # may raise, so it comes first
        in_sections += self._change_section("prefix_store", wanted)
        keys = (key for key in Config.__struct_fields__ if key not in {"models", *_SECTIONS})
        differing = [key for key in keys if getattr(self.settings, key) != getattr(wanted, key)]
        changes = in_sections + [await self._change(key, wanted) for key in differing]
        for change in changes[len(in_sections) :]:
            if not change.pending:
                after = {change.key: getattr(wanted, change.key)}
                self.settings = replace(self.settings, **after)
        changes += await self._change_models(wanted)
        if "models_dir" in differing:
            await self._find_models()
        self.pending = tuple(change.key for change in changes if change.pending)
        for change in changes:
            self._log_change(change)
        return changes

    async def _find_models(self) -> None:
        """Read the models folder again."""
        folder = models_dir(self.settings, self._options.home.root)
        await self._running.set_found_models(await asyncio.to_thread(sources_in, folder))

    async def _change(self, key: str, wanted: Config) -> Changed:
        before, after = getattr(self.settings, key), getattr(wanted, key)
        takes_effect: TakesEffect = "now" if key in LIVE else "start"
        if is_overridden(key, self._options):
            takes_effect = "command_line"
        elif key == "budget":
            await self.set_budget(wanted)
        elif key == "log_level":
            logs.set_level(wanted.log_level)
        return Changed(key, before, after, takes_effect)

    async def set_budget(self, wanted: Config) -> None:
        total = wanted.budget_bytes
        await self._running.set_budget(self._default_budget() if total is None else total)

    def _change_section(self, section: str, wanted: Config) -> list[Changed]:
        before, after = getattr(self.settings, section), getattr(wanted, section)
        fields = [f for f in after.__struct_fields__ if getattr(before, f) != getattr(after, f)]
        live = {field: getattr(after, field) for field in fields if f"{section}.{field}" in LIVE}
        if live:
            changed = replace(before, **live)
            if isinstance(changed, PrefixStoreSettings):
                self._running.limit_prefix_store(changed.limits)
            else:
                self._apply_http(changed)
            self.settings = replace(self.settings, **{section: changed})
        changes = []
        for field in fields:
            takes_effect: TakesEffect = "now" if field in live else "start"
            key = f"{section}.{field}"
            if is_overridden(key, self._options):
                takes_effect = "command_line"
            changes.append(Changed(key, _shown(field, before), _shown(field, after), takes_effect))
        return changes

    async def _change_models(self, wanted: Config) -> list[Changed]:
        before, after = by_name(self.settings), by_name(wanted)
        changes: list[Changed] = []
        in_effect: list[str | ModelEntry] = []
        for name, entry in after.items():
            old = before.get(name)
            if old is not None and not _differing_fields(old, entry):
                in_effect.append(entry)
                continue
            changes_of_model = await self._change_model(name, old, entry)
            changes += changes_of_model
            in_effect += _in_effect(old, entry, changes_of_model)
        for name in before.keys() - after.keys():
            await self._running.remove_configured_model(name)
            changes.append(Changed(f"models[{name}]", before[name].source, None))
        self.settings = replace(self.settings, models=in_effect)
        return changes

    async def _change_model(
        self, name: str, old: ModelEntry | None, entry: ModelEntry
    ) -> list[Changed]:
        fields = _differing_fields(old, entry)
        policy = {field: getattr(entry, field) for field in fields if field in _POLICY}
        known = known_model(entry, self._options.home.root)
        applied = await self._running.add_configured_model(name, known, policy)
        affects_load = any(field not in LIVE_OF_A_MODEL for field in fields)
        if applied and affects_load and entry.load == "start" and not self._options.models:
            self._load(entry)
        if old is None:
            takes_effect: TakesEffect = "now" if applied else "unload"
            return [Changed(f"models[{name}]", None, entry.source, takes_effect)]
        return [
            Changed(
                f"models[{name}].{field}",
                getattr(old, field),
                getattr(entry, field),
                "now" if applied or field in LIVE_OF_A_MODEL else "unload",
            )
            for field in fields
        ]

    def _log_change(self, change: Changed) -> None:
        event, level = _EVENTS[change.takes_effect]
        values = {"before": change.before, "after": change.after}
        plain = {k: v for k, v in values.items() if isinstance(v, str | int | float | None)}
        getattr(self._log, level)(event, key=change.key, **plain)


_POLICY = frozenset(LIVE_OF_A_MODEL - {"load"})
_EVENTS: dict[TakesEffect, tuple[str, str]] = {
    "now": ("setting changed", "info"),
    "unload": ("setting waits until the model is unloaded and the config reloaded", "warning"),
    "start": ("setting waits for a restart of the daemon", "warning"),
    "command_line": ("setting has no effect: the command line overrides it", "warning"),
}


def by_name(settings: Config) -> dict[str, ModelEntry]:
    return {entry.name: entry for entry in settings.entries}


def known_model(entry: ModelEntry, root: Path) -> KnownModel:
    return KnownModel(absolute(entry.source, root), entry.kv_spec, entry.policy, listed=True)


def known_models(settings: Config, root: Path) -> dict[str, KnownModel]:
    """Return the models that are known at start: those of the models folder and of the file."""
    found = sources_in(models_dir(settings, root))
    known = {name: KnownModel(source, found=True) for name, source in found.items()}
    return known | {name: known_model(entry, root) for name, entry in by_name(settings).items()}


def _shown(field: str, settings: HttpSettings | PrefixStoreSettings) -> Any:
    """Return the value of a field; for API keys, only their names."""
    value = getattr(settings, field)
    return sorted(value) if field == "keys" else value


def _differing_fields(old: ModelEntry | None, entry: ModelEntry) -> list[str]:
    if old is None:
        return ["source", *sorted(_POLICY)]
    fields = [field for field in ModelEntry.__struct_fields__ if field not in {"alias", "kv"}]
    found = [field for field in fields if getattr(old, field) != getattr(entry, field)]
    return [*found, "kv"] if old.kv_spec != entry.kv_spec else found


def _in_effect(
    old: ModelEntry | None, entry: ModelEntry, changes: list[Changed]
) -> list[ModelEntry]:
    """Return the entry without its pending changes, so that the next reload finds them again."""
    pending = [change.key.rpartition(".")[2] for change in changes if change.pending]
    if old is None:
        return [] if pending else [entry]
    return [replace(entry, **{field: getattr(old, field) for field in pending})]


def is_overridden(key: str, options: Options) -> bool:
    tcp = options.host is not None or options.port is not None
    overridden = {
        "budget": options.budget_bytes is not None,
        "attention": options.attention is not None,
        "http.enabled": options.no_http or tcp,
        "http.tcp": tcp,
        "http.host": options.host is not None,
        "http.port": options.port is not None or options.default_port is not None,
    }
    return overridden.get(key, False)
