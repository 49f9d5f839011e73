"""`config.toml`: read once at start, into values that hold.

Covers the file's shape, its defaults and errors that name the key. Does not cover the command
line, whose options `kvd.daemon.daemon` lays over the result.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.machines.watchdog import WatchdogTimeouts
from actors.saved_requests import KEEP_S
from kvd.config.http import HttpSettings
from kvd.config.kv import KVText, parse_kv
from kvd.config.options import Attention
from kvd.host.memory import nvidia
from kvd.host.units import MAX_BYTES, parse_bytes
from protocol.errors import ConfigError
from protocol.policy import ModelPolicy
from protocol.types import Alias, KVSpec, Name, TimeSlicesMode
from protocol.validation import explain

if TYPE_CHECKING:
    from pathlib import Path


CHUNK = 256
CUDA_CHUNK = 1024
"""Of Qwen3-0.6B on an H200: 37 ms for 256 tokens, 41 for 1024; 1024 pass while 7 rows wait once."""


class ModelEntry(ModelPolicy, frozen=True, forbid_unknown_fields=True):
    """One model that the daemon knows, and how it stands beside the others."""

    source: Name
    """An embedded name (``demo``), a folder's absolute path, or a Hub id."""
    alias: Alias | None = None
    """The name that requests use; absent: the model's own short name."""
    kv: str | KVText = "k8v8"
    """A scheme, or a table with ``scheme`` and the other settings."""
    load: Literal["start", "demand"] = "start"
    """``start``: when the daemon starts; ``demand``: when a request names it."""

    @property
    def policy(self) -> ModelPolicy:
        """How it stands beside the others."""
        return ModelPolicy(
            priority=self.priority,
            pinned=self.pinned,
            idle_ttl_s=self.idle_ttl_s,
            max_context=self.max_context,
            weight=self.weight,
        )

    @property
    def kv_spec(self) -> KVSpec:
        """The settings as they travel; `load` has checked them."""
        return parse_kv(self.kv) if isinstance(self.kv, str) else self.kv.spec


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of `config.toml`."""

    budget: str | Annotated[int, Meta(ge=1, le=MAX_BYTES)] | None = None
    """For all models together; absent: three quarters of what Metal recommends, of the CUDA
    device's memory, or of RAM (or the cgroup's limit)."""
    models: list[str | ModelEntry] = []
    """Names, folders and Hub ids, or tables; ``./x`` is relative to the home, ``~/x`` to yours."""
    max_rows: Annotated[int, Meta(ge=1, le=512)] = 32
    """The most rows in one decode step of a model."""
    prefill_chunk: Annotated[int, Meta(ge=64, le=8192, multiple_of=64)] | None = None
    """Prompt tokens in one step. Part of what decides the output, so change it knowingly; absent:
    256, on CUDA 1024."""
    time_slices: TimeSlicesMode = "auto"
    """Whether models that compute at once take turns; ``auto``: where there is an accelerator."""
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long a stop waits for what runs before it ends it; launchd's ``ExitTimeOut`` is above."""
    blas: str = "auto"
    """Linux without an accelerator: ``auto``, ``off``, or the library to preload into workers."""
    native: Literal["auto", "off"] = "auto"
    """The same machines, and CUDA: whether workers build and use operations of kvd's own."""
    attention: Attention = "auto"
    """``reference``: decode attention by MLX's plain operations, on any device."""
    watchdog: WatchdogTimeouts = WatchdogTimeouts()
    """Seconds after which a silent worker is ended, by what it does: ``decode_s`` and so on."""
    journal: Literal["memory", "disk"] = "memory"
    """Where requests are kept so that they go on: ``disk`` outlives the daemon too."""
    journal_limit: str | Annotated[int, Meta(ge=1, le=MAX_BYTES)] = "256MiB"
    """Of the file on the disk; beyond it requests are served and not kept."""
    journal_keep_s: Annotated[float, Meta(gt=0)] = KEEP_S
    """How long a request of a daemon that died waits for its client."""
    swap_limit: str | Annotated[int, Meta(ge=0, le=MAX_BYTES)] = "16GiB"
    """Of one model's parked rows on the disk; beyond it they are computed again. 0: all are."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that goes to the log."""
    http: HttpSettings = HttpSettings()
    """Where and for whom OpenAI's HTTP interface answers."""

    @property
    def chunk(self) -> int:
        """Prompt tokens in one step: on CUDA a chunk takes about as long with 256 as with 1024."""
        return self.prefill_chunk or (CUDA_CHUNK if nvidia.total_memory() else CHUNK)

    @property
    def budget_bytes(self) -> int | None:
        """The budget as a number; `load` has checked it."""
        return parse_bytes(self.budget) if isinstance(self.budget, str) else self.budget

    @property
    def journal_bytes(self) -> int:
        """The journal's limit as a number; `load` has checked it."""
        limit = self.journal_limit
        return parse_bytes(limit) if isinstance(limit, str) else limit

    @property
    def swap_bytes(self) -> int:
        """That limit as a number; `load` has checked it."""
        limit = self.swap_limit
        return parse_bytes(limit) if isinstance(limit, str) else limit

    @property
    def entries(self) -> list[ModelEntry]:
        """The models to load, all as tables."""
        return [ModelEntry(m) if isinstance(m, str) else m for m in self.models]


def load(path: Path) -> Config:
    """Return the configuration of this file, or the defaults if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", key="") from error
    return parse(text, str(path))


def parse(text: str, path: str = "config.toml") -> Config:
    """Return the configuration that this text stands for; errors name the key."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", key="") from error
    return convert(data, path)


def convert(data: dict[str, Any], path: str) -> Config:
    """Return the configuration that these values stand for; errors name the key."""
    try:
        config = msgspec.convert(data, Config, str_keys=True)
    except msgspec.ValidationError as error:
        key, text = explain(str(error), Config)
        raise ConfigError(f"{path}: {text}", key=key) from error
    _check_texts(config, path)
    return config


def _check_texts(config: Config, path: str) -> None:
    key = "budget"
    try:
        _ = config.budget_bytes
        key = "journal_limit"
        _ = config.journal_bytes
        key = "swap_limit"
        _ = config.swap_bytes
        key = "http.body_limit"
        _ = config.http.body_bytes
        for index, entry in enumerate(config.entries):
            key = f"models[{index}].kv"
            _ = entry.kv_spec
    except ValueError as error:
        raise ConfigError(f"{path}: {key}: {error}", key=key) from error
