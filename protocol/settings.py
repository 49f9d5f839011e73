"""The configuration in messages: settings with the origin of their values, and changes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Origin = Literal["default", "file", "command_line", "live"]
"""Where a value comes from. ``live`` values were changed in the running daemon. They last until it
ends or reads its file again."""
TakesEffect = Literal["now", "unload", "start", "command_line"]
"""When a change takes effect: ``now``; after the model is unloaded and the configuration reloaded
(``unload``); at the daemon's next start (``start``); or never, because the command line overrides
it (``command_line``)."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One setting of `config.toml`, or of a model in it."""

    key: str
    """Key such as ``budget``, ``watchdog.decode_s`` or ``models[demo].priority``."""
    value: Any = None
    """Value in force; absent: the daemon decides."""
    default: Any = None
    origin: Origin = "default"
    """Source of the value."""
    live: bool = False
    """Whether the setting can change while the daemon runs."""
    pending: bool = False
    """Whether ``next`` is in the file and takes effect at the daemon's next start."""
    next: Any = None
    """Value after the next start."""


class Changed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of one setting, or of a whole model."""

    key: str
    """Key as in `Setting`; ``models[demo]`` if the file gained or lost the model."""
    before: Any = None
    after: Any = None
    takes_effect: TakesEffect = "now"
    """Time at which the change takes effect."""

    @property
    def pending(self) -> bool:
        return self.takes_effect in {"unload", "start"}
