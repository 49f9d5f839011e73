"""What of the configuration may change while the daemon runs, and how it does.

Compares what holds with what is wanted, applies what can hold at once, and names the rest: a change
that waits for the next start is never taken for done. A configuration that is wrong is refused as a
whole, and the one before it holds on. Does not cover who asks for it: SIGHUP is in `kvd.daemon.daemon`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import structlog
from msgspec.structs import replace

from actors.known_models import KnownModel
from actors.registry_state import short_name
from kvd.config import config
from kvd.config.config import Config, ModelEntry
from kvd.config.http import OF_THE_COMMAND_LINE
from kvd.config.sources import absolute
from kvd.host import blas, logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvd.config.http import HttpSettings
    from kvd.config.options import Options

LIVE_OF_HTTP = ("keys", "hosts", "origins")
LIVE = frozenset(
    {"budget", "drain_timeout_s", "log_level", "models", *(f"http.{key}" for key in LIVE_OF_HTTP)}
)
"""Keys of `config.toml` that hold at once; every other one from the next start on."""
LIVE_OF_A_MODEL = frozenset({"priority", "pinned", "idle_ttl_s", "weight", "load"})
"""The same of a model; others hold at once only while it is not loaded."""

TakesEffect = Literal["now", "unload", "start", "command_line"]
"""From when on: ``unload`` when the model has been unloaded and the configuration is read again,
``start`` from the daemon's next one; ``command_line``: never, since that says something else."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """One setting that is another."""

    key: str
    """Such as ``budget``, ``models[demo]`` or ``models[demo].priority``."""
    before: Any
    after: Any
    takes_effect: TakesEffect = "now"

    @property
    def pending(self) -> bool:
        """Whether something has to happen before it holds."""
        return self.takes_effect in {"unload", "start"}


class Running(Protocol):
    """What `actors.system.System` lets us change."""

    async def set_budget(self, total_bytes: int) -> None:
        """Let so much be granted in all from now on."""
        ...

    async def add_configured_model(
        self, name: str, known: KnownModel, policy: Mapping[str, Any]
    ) -> bool:
        """Know a model of the configuration, and set these fields of its policy.

        Return whether it is loaded from now on as `known` says; not while it is loaded otherwise.
        """
        ...

    async def remove_configured_model(self, name: str) -> None:
        """Forget that a model is in the configuration; if it is loaded it stays so."""
        ...


class Reloader:
    """The configuration that holds, and the way to another one."""

    def __init__(
        self,
        options: Options,
        settings: Config,
        running: Running,
        *,
        default_budget: Callable[[], int],
        bring: Callable[[ModelEntry], None],
        admit: Callable[[HttpSettings], None] = lambda _: None,
    ) -> None:
        """`bring` has a model loaded, in the background; `admit` lets in whom HTTP now admits."""
        self._options = options
        self._running = running
        self._default_budget = default_budget
        self._bring = bring
        self._admit = admit
        self._log = structlog.get_logger("kvd.config.reload")
        self.turn = asyncio.Lock()
        """Held by who changes `settings`, from his look at them on: nobody undoes another's."""
        self.settings = settings
        """What holds."""
        self.waiting: tuple[str, ...] = ()
        """The keys of those changes that do not hold yet."""

    async def reload(self) -> list[Change]:
        """Read the file again; raises `ConfigError`, and nothing has changed then."""
        async with self.turn:
            return await self.take(config.load(self._options.home.config))

    async def take(self, wanted: Config) -> list[Change]:
        """Let this configuration hold as far as it can, and return what changed.

        The caller has the `turn`, and had it when he made this of the settings that hold.
        """
        assert self.turn.locked(), "changes settings out of turn"
        blas.choose(wanted.blas)  # the next start must not find it wrong
        http = self._take_http(wanted)  # it may raise, so it comes first
        changes = http + [await self._set(key, wanted) for key in self._plain(wanted)]
        for change in changes[len(http) :]:
            if not change.pending:
                after = {change.key: getattr(wanted, change.key)}
                self.settings = replace(self.settings, **after)
        changes += await self._take_models(wanted)
        self.waiting = tuple(change.key for change in changes if change.pending)
        for change in changes:
            self._say(change)
        return changes

    def _plain(self, wanted: Config) -> list[str]:
        """Return the keys that differ, but for the models and HTTP."""
        fields = (key for key in Config.__struct_fields__ if key not in {"models", "http"})
        return [key for key in fields if getattr(self.settings, key) != getattr(wanted, key)]

    async def _set(self, key: str, wanted: Config) -> Change:
        before, after = getattr(self.settings, key), getattr(wanted, key)
        takes_effect: TakesEffect = "now" if key in LIVE else "start"
        if overlaid(key, self._options):
            takes_effect = "command_line"
        elif key == "budget":
            total = wanted.budget_bytes
            await self._running.set_budget(self._default_budget() if total is None else total)
        elif key == "log_level":
            logs.set_level(wanted.log_level)
        return Change(key, before, after, takes_effect)

    def _take_http(self, wanted: Config) -> list[Change]:
        before, after = self.settings.http, wanted.http
        fields = [f for f in after.__struct_fields__ if getattr(before, f) != getattr(after, f)]
        live = {field: getattr(after, field) for field in fields if field in LIVE_OF_HTTP}
        if live:
            admitted = replace(before, **live)
            self._admit(admitted)
            self.settings = replace(self.settings, http=admitted)
        changes = []
        for field in fields:
            was, wants = _shown(field, before), _shown(field, after)
            takes_effect: TakesEffect = "now" if field in live else "start"
            if overlaid(f"http.{field}", self._options):
                takes_effect = "command_line"
            changes.append(Change(f"http.{field}", was, wants, takes_effect))
        return changes

    async def _take_models(self, wanted: Config) -> list[Change]:
        before, after = named(self.settings), named(wanted)
        changes: list[Change] = []
        hold: list[str | ModelEntry] = []
        for name, entry in after.items():
            old = before.get(name)
            if old is not None and not _differing(old, entry):
                hold.append(entry)
                continue
            of_it = await self._take_model(name, old, entry)
            changes += of_it
            hold += _held_back(old, entry, of_it)
        for name in before.keys() - after.keys():
            await self._running.remove_configured_model(name)
            changes.append(Change(f"models[{name}]", before[name].source, None))
        self.settings = replace(self.settings, models=hold)
        return changes

    async def _take_model(
        self, name: str, old: ModelEntry | None, entry: ModelEntry
    ) -> list[Change]:
        fields = _differing(old, entry)
        policy = {field: getattr(entry, field) for field in fields if field in _POLICY}
        known = known_as(entry, self._options.home.root)
        as_said = await self._running.add_configured_model(name, known, policy)
        otherwise = [field for field in fields if field not in LIVE_OF_A_MODEL]
        if as_said and otherwise and entry.load == "start" and not self._options.models:
            self._bring(entry)
        if old is None:
            takes_effect: TakesEffect = "now" if as_said else "unload"
            return [Change(f"models[{name}]", None, entry.source, takes_effect)]
        return [
            Change(
                f"models[{name}].{field}",
                getattr(old, field),
                getattr(entry, field),
                "now" if as_said or field in LIVE_OF_A_MODEL else "unload",
            )
            for field in fields
        ]

    def _say(self, change: Change) -> None:
        event, level = _SAID[change.takes_effect]
        values = {"before": change.before, "after": change.after}
        plain = {k: v for k, v in values.items() if isinstance(v, str | int | float | None)}
        getattr(self._log, level)(event, key=change.key, **plain)


_POLICY = frozenset(LIVE_OF_A_MODEL - {"load"})
_SAID: dict[TakesEffect, tuple[str, str]] = {
    "now": ("setting changed", "info"),
    "unload": ("setting waits until the model is unloaded and the config reloaded", "warning"),
    "start": ("setting waits for a restart of the daemon", "warning"),
    "command_line": ("setting has no effect: the command line says otherwise", "warning"),
}


def named(settings: Config) -> dict[str, ModelEntry]:
    """Return the models of a configuration by their names."""
    return {entry.alias or short_name(entry.source): entry for entry in settings.entries}


def known_as(entry: ModelEntry, root: Path) -> KnownModel:
    """Return how a model of the configuration is loaded."""
    return KnownModel(absolute(entry.source, root), entry.kv_spec, entry.policy, listed=True)


def _shown(field: str, of: HttpSettings) -> Any:
    """Return the value of a field; of keys only whose they are."""
    value = getattr(of, field)
    return sorted(value) if field == "keys" else value


def _differing(old: ModelEntry | None, entry: ModelEntry) -> list[str]:
    if old is None:
        return ["source", *sorted(_POLICY)]
    fields = [field for field in ModelEntry.__struct_fields__ if field not in {"alias", "kv"}]
    found = [field for field in fields if getattr(old, field) != getattr(entry, field)]
    return [*found, "kv"] if old.kv_spec != entry.kv_spec else found


def _held_back(
    old: ModelEntry | None, entry: ModelEntry, changes: list[Change]
) -> list[ModelEntry]:
    """Return the entry without what does not hold yet, so that the next reload finds it again."""
    pending = [change.key.rpartition(".")[2] for change in changes if change.pending]
    if old is None:
        return [] if pending else [entry]
    return [replace(entry, **{field: getattr(old, field) for field in pending})]


def overlaid(key: str, options: Options) -> bool:
    """Return whether the command line says something in the place of this key."""
    if key == "budget":
        return options.budget_bytes is not None
    table, _, field = key.partition(".")
    if table == "http" and field in OF_THE_COMMAND_LINE:
        return options.http is not None
    return key == "attention" and options.attention is not None
