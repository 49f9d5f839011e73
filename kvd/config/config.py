"""`config.toml`: its settings, their defaults, and errors that name the key."""

from __future__ import annotations

import re
import sys
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from actors.machines.prefix_store_events import StoreLimits
from actors.machines.watchdog import WatchdogTimeouts
from actors.saved_requests import KEEP_S
from kvd.config.budget import parse_budget
from kvd.config.http import HttpSettings
from kvd.config.kv import KVText, parse_kv
from kvd.config.options import Attention
from kvd.host.memory import nvidia
from kvd.host.units import MAX_BYTES, parse_bytes
from protocol.embedding import EmbeddingsMode
from protocol.errors import ConfigError
from protocol.fields import (
    ALIAS_PATTERN,
    ALIAS_RULE,
    TEXT_PATTERN,
    Alias,
    PositiveSeconds,
    Seconds,
    Source,
)
from protocol.kv import BitsMode, KVSpec
from protocol.model_source import short_name
from protocol.policy import ModelPolicy
from protocol.types import TimeSlicesMode
from protocol.validation import describe_error

if TYPE_CHECKING:
    from pathlib import Path


CHUNK = 256
CPU_CHUNK = 64
"""Passes take several chunks, so small chunks cost little on the CPU: prefill takes a tenth more
CPU time than with chunks of 256. Eight prompts with 1500 of 1540 tokens in the cache take half of
the CPU time."""
CUDA_CHUNK = 1024
"""With chunks of 256 and `SCRATCH`, a prompt of 50,000 tokens takes 3.3 s instead of 2.0. With 32
prompts with 1500 common tokens, 667 to 880 instead of 816 to 919 tokens per second are generated,
although the prefix cache covers more of the prompts (Qwen3-0.6B's shape, H200)."""
SCRATCH = 256 * 1024 * 1024
"""Bytes that dense copies of a prefill pass may take."""
CUDA_SCRATCH = 2 * 1024 * 1024 * 1024
CUDA_SCRATCH_PARTS = 32
"""With CUDA the scratch is the budget divided by this number, from `SCRATCH` to `CUDA_SCRATCH`. A
full scratch stops the device until its copies are evaluated. With 2 GiB, Qwen3-0.6B on an H200
prefills 50,000 tokens in 2.5 s instead of 5.9, and 16,384 in 0.56 s instead of 0.85."""


_WORD = r"[^\s\"'\[\]{},#=]+"
_UNQUOTED = re.compile(rf"\s*([\w.-]+)\s*=\s*({_WORD}(?: {_WORD})*)\s*(?:#.*)?")
"""A line such as ``budget = 8GiB``, which TOML refuses."""


class ModelEntry(ModelPolicy, frozen=True, forbid_unknown_fields=True):
    """One model of the configuration."""

    source: Source
    """The embedded model (``demo``), the path of a folder, or a Hub id."""
    alias: Alias | None = None
    """Name for requests. Default: the short name of the source."""
    kv: str | KVText = "k8v8"
    """A KV scheme, or a table with ``scheme`` and other settings."""
    load: Literal["start", "demand"] = "start"
    """``start``: loaded with the daemon. ``demand``: loaded by the first request that names it."""

    @property
    def name(self) -> str:
        """Name that requests use."""
        return self.alias or short_name(self.source)

    @property
    def policy(self) -> ModelPolicy:
        return ModelPolicy(
            priority=self.priority,
            pinned=self.pinned,
            idle_ttl_s=self.idle_ttl_s,
            max_context=self.max_context,
            ranks=self.ranks,
            device=self.device,
            weight=self.weight,
        )

    @property
    def kv_spec(self) -> KVSpec:
        """The settings of the protocol; `load` has checked them."""
        return parse_kv(self.kv) if isinstance(self.kv, str) else self.kv.spec


class PrefixStoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where prefixes of prompts outlive their worker: ``[prefix_store]``."""

    LIMITS: ClassVar = ("limit", "daily_writes", "keep_free")
    """Settings that take effect at once."""
    limit: str | Annotated[int, Meta(ge=0, le=MAX_BYTES)] = 0
    """Maximum size of all stored prefixes on disk, of all models together, such as ``20GB``. With
    0, nothing is stored."""
    daily_writes: str | Annotated[int, Meta(ge=0, le=MAX_BYTES)] = "50GB"
    """Maximum bytes written in a day (UTC). Prefixes that were not used again may take half."""
    keep_free: str | Annotated[int, Meta(ge=0, le=MAX_BYTES)] = "5GB"
    """Free space of the file system that is left to other programs: below it, stored prefixes are
    deleted and none are written."""
    encrypt: bool = False
    """Whether stored prefixes and preempted requests on disk are encrypted. The key is in
    `prefixes.key`. A change deletes the stored prefixes. The journal is never encrypted."""

    @property
    def limits(self) -> StoreLimits:
        """The limits in bytes; raises ValueError for a text that is no size."""
        sizes = {}
        for field in self.LIMITS:
            try:
                sizes[field] = parse_bytes(getattr(self, field))
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from error
        return StoreLimits(sizes["limit"], sizes["daily_writes"], sizes["keep_free"])


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of `config.toml`."""

    budget: str | Annotated[int, Meta(ge=1, le=MAX_BYTES)] | None = None
    """Bytes for all models together, at least 64 MiB. Default: three quarters of the memory that
    Metal recommends, of the CUDA device's memory, or of RAM (or the cgroup's limit). With several
    CUDA devices, each has this budget, and the default is that of the smallest one."""
    models: list[Source | ModelEntry] = []
    """Sources or tables. ``./x`` is relative to the daemon's home, ``~/x`` to the user's."""
    models_dir: Annotated[str, Meta(max_length=4096, pattern=TEXT_PATTERN)] = "./models"
    """Folder whose folders are models that requests may name, by the folder's name. ``./x`` is
    relative to the daemon's home. Empty: none."""
    max_rows: Annotated[int, Meta(ge=1, le=512)] = 32
    """Maximum rows in one decode step of a model."""
    prefill_chunk: Annotated[int, Meta(ge=64, le=8192, multiple_of=64)] | None = None
    """Prompt tokens of a chunk. They attend to each other before they are quantized, and stored
    prefixes end where a chunk ends. Affects the output. Default: 64 on CPUs (256 for models whose
    passes take one chunk), 256 on Metal, 1024 with CUDA."""
    time_slices: TimeSlicesMode = "auto"
    """Whether models share the accelerator in time slices. ``auto``: if there is an accelerator."""
    drain_timeout_s: Seconds = 30.0
    """Seconds that a stop waits for running requests. Must be below launchd's ``ExitTimeOut``."""
    blas: str = "auto"
    """BLAS for workers on Linux without an accelerator: ``auto``, ``off``, or the path of a library
    to preload."""
    native: Literal["auto", "off"] = "auto"
    """Whether workers compile and use kvd's own operations, on Linux without an accelerator and on
    CUDA."""
    attention: Attention = "auto"
    """``reference`` computes decode attention with MLX's own operations, on any device."""
    watchdog: WatchdogTimeouts = WatchdogTimeouts()
    """Seconds after which a silent worker is ended, by phase: ``decode_s`` and so on."""
    journal: Literal["memory", "disk"] = "memory"
    """Where requests are kept, so that they continue after a crash. ``disk`` also survives a crash
    of the daemon."""
    journal_limit: str | Annotated[int, Meta(ge=1, le=MAX_BYTES)] = "256MiB"
    """Maximum size of the journal's file. Requests beyond it are served, but not kept."""
    journal_keep_s: PositiveSeconds = KEEP_S
    """Seconds that a request waits for its client after the daemon died."""
    swap_limit: str | Annotated[int, Meta(ge=0, le=MAX_BYTES)] = "16GiB"
    """Maximum size of one model's swapped-out rows on disk. Rows beyond it are recomputed; with 0,
    all of them."""
    prefix_store: PrefixStoreSettings = PrefixStoreSettings()
    """Prefixes of prompts on disk, which outlive their worker."""
    embeddings: EmbeddingsMode = "auto"
    """Which models give embeddings. ``auto``: those that were trained for it, by their
    `1_Pooling/config.json` or with ``embed`` in their source. ``any``: also chat models."""
    bits_by_layer: BitsMode = "auto"
    """Whether layers of one precision level may have different bits, of the same size together.
    ``auto``: chosen by a calibration, or by an estimate of each layer's loss. ``off``: never."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    http: HttpSettings = HttpSettings()
    """Where the HTTP server listens, and who may use it."""

    @property
    def chunk(self) -> int:
        """Prompt tokens of a chunk, with the device's default."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        if nvidia.first_device():
            return CUDA_CHUNK
        return CHUNK if sys.platform == "darwin" else CPU_CHUNK

    @property
    def lone_chunk(self) -> int | None:
        """Prompt tokens of a chunk for models whose passes take only one; None: `chunk`."""
        return CHUNK if self.prefill_chunk is None and self.chunk == CPU_CHUNK else None

    def attention_scratch(self, budget: int) -> int:
        """Return the bytes that dense copies may take in prefill, with a budget in bytes.

        A power of two: stored prefixes and kept checks are of one size, and a budget that changes
        a little should not lose them.
        """
        if nvidia.first_device() is None:
            return SCRATCH
        part = 1 << max(0, (budget // CUDA_SCRATCH_PARTS).bit_length() - 1)
        return min(CUDA_SCRATCH, max(SCRATCH, part))

    @property
    def budget_bytes(self) -> int | None:
        return None if self.budget is None else parse_budget(self.budget)

    @property
    def journal_bytes(self) -> int:
        return parse_bytes(self.journal_limit)

    @property
    def swap_bytes(self) -> int:
        return parse_bytes(self.swap_limit)

    @property
    def entries(self) -> list[ModelEntry]:
        return [ModelEntry(m) if isinstance(m, str) else m for m in self.models]


def load(path: Path) -> Config:
    """Read a file; without a file, return the defaults."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", key="") from error
    return parse(text, str(path))


def parse(text: str, path: str = "config.toml") -> Config:
    """Parse TOML; raises `ConfigError` with the key."""
    return convert(read_toml(text, path), f"{path}: ")


def read_toml(text: str, path: str = "config.toml") -> dict[str, Any]:
    """Return the tables of a text; raises `ConfigError` if it is not TOML."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also for integers with more than 4300 digits
        hint = _quotes_hint(text, str(error))
        raise ConfigError(f"{path} is not TOML: {error}{hint}", key="") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; no setting needs that", key="") from error


def _quotes_hint(text: str, error: str) -> str:
    """Return advice if the line that the parser names is valid with quotes around its value."""
    found = re.search(r"at line (\d+)", error)
    lines = text.splitlines()
    if found is None or not 1 <= int(found[1]) <= len(lines):
        return ""
    unquoted = _UNQUOTED.fullmatch(lines[int(found[1]) - 1])
    if unquoted is None:
        return ""
    return f'; write texts in quotes: {unquoted[1]} = "{unquoted[2]}"'


def convert(data: dict[str, Any], where: str = "") -> Config:
    """Convert parsed TOML; raises `ConfigError` with the key. ``where`` begins its message."""
    try:
        config = msgspec.convert(data, Config, str_keys=True)
    except msgspec.ValidationError as error:
        key, text = describe_error(str(error), Config)
        raise ConfigError(f"{where}{text}", key=key) from error
    _check_texts(config, where)
    _check_names(config, where)
    return config


def _check_texts(config: Config, where: str) -> None:
    key = "budget"
    try:
        _ = config.budget_bytes
        key = "journal_limit"
        _ = config.journal_bytes
        key = "swap_limit"
        _ = config.swap_bytes
        key = "prefix_store"
        _ = config.prefix_store.limits
        key = "http.body_limit"
        _ = config.http.body_bytes
        for index, entry in enumerate(config.entries):
            key = f"models[{index}].kv"
            _ = entry.kv_spec
    except ValueError as error:
        raise ConfigError(f"{where}{key}: {error}", key=key) from error


def _check_names(config: Config, where: str) -> None:
    """Raise `ConfigError` if requests could not name one of the models."""
    names: dict[str, int] = {}
    for index, entry in enumerate(config.entries):
        key = f"models[{index}]"
        if re.search(ALIAS_PATTERN, entry.name) is None:
            raise ConfigError(
                f"{where}{key} has the name {entry.name[:40]!r}, but a name {ALIAS_RULE}; give "
                "the model an alias",
                key=key,
            )
        if (first := names.setdefault(entry.name, index)) != index:
            raise ConfigError(
                f"{where}{key} and models[{first}] have the same name {entry.name!r}; give one of "
                "them another alias",
                key=key,
            )
