"""The configuration as it travels: each setting with where its value comes from, and changes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Origin = Literal["default", "file", "command_line", "live"]
"""``live``: it was changed while the daemon runs, and until that ends or reads its file again."""
TakesEffect = Literal["now", "unload", "start", "command_line"]
"""From when on: ``unload`` when the model has been unloaded and the configuration is read again,
``start`` from the daemon's next one; ``command_line``: never, since that says something else."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One setting of `config.toml`, or of a model in it."""

    key: str
    """Such as ``budget``, ``watchdog.decode_s`` or ``models[demo].priority``."""
    value: Any = None
    """What holds; absent: the daemon decides."""
    default: Any = None
    origin: Origin = "default"
    live: bool = False
    """It may be changed while the daemon runs."""
    pending: bool = False
    """The file says ``next`` since the daemon started: that holds from its next start on."""
    next: Any = None


class Changed(msgspec.Struct, frozen=True, omit_defaults=True):
    """One setting that is another."""

    key: str
    before: Any = None
    after: Any = None
    takes_effect: TakesEffect = "now"
