"""A fake model: its speed, sizes and faults, as given in its name.

``fake:tps=200,load=0.1,crash_after=50`` is a model that loads in 0.1 s, makes 200 steps per second
and ends its process in step 50. `FakeModel` lists all keys.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from kvd.worker.fake.embedding import INFO
from kvd.worker.fake.tokens import VOCABULARY
from protocol import paths
from protocol.costs import RESERVED_TOKENS
from protocol.errors import ErrorInfo, InvalidModel, UnknownModel, from_info
from protocol.kv import KVSpec
from protocol.pages import PAGE_TOKENS
from protocol.types import ChatAbilities, KVPart, ModelInfo

CRASH_STATUS = 70  # EX_SOFTWARE
_LOAD_STAGES = 10


class FakeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys that may follow ``fake:``."""

    tps: float = 1000.0
    """Steps per second, and thus tokens per second of each row. 0: unlimited."""
    load: float = 0.0
    """Seconds to load."""
    load_error: str = ""
    """Wire code of the error that the load fails with."""
    load_crash: bool = False
    load_hang: bool = False
    load_grow: bool = False
    """The process takes memory without end before it asks for any."""
    grow_on: str = ""
    """It does so at the first token of a prompt that contains this text."""
    crash_after: int = 0
    """Step in which the process ends. 0: never."""
    crash_on: str = ""
    """The process ends at the first token of a prompt that contains this text."""
    hang_after: int = 0
    """Step that never returns. 0: never."""
    hang_on: str = ""
    """The step of the first token of a prompt that contains this text never returns."""
    deaf: bool = False
    """A hanging process ignores SIGTERM, as one that hangs in a driver call does."""
    nan_after: int = 0
    """Token of each row at which its logits become invalid. 0: never."""
    nan_on: str = ""
    """Rows whose prompt contains this text have invalid logits."""
    eos_after: int = 0
    """Token at which each row ends on its own. 0: never."""
    open_end: int = 512
    """Token at which rows without ``max_tokens`` end on their own, unless `eos_after` is given.
    0: never."""
    weights: int = 64 * 1024 * 1024
    page_bytes: int = 64 * 1024
    pages: int = 64
    """Pages of the first grant."""
    context: int = 16_384
    tools: bool = True
    """Whether the model can call tools."""
    ahead: int = RESERVED_TOKENS
    """Tokens up to which a reservation is extended (`kvd.worker.scheduling.growth`)."""

    def ends_at(self, max_tokens: int | None) -> int:
        """Return the token at which a row ends on its own. 0: it does not."""
        return self.eos_after or (self.open_end if max_tokens is None else 0)

    def crash(self) -> NoReturn:
        os._exit(CRASH_STATUS)

    def grow(self, sleep: Callable[[float], None]) -> NoReturn:
        """Take some 500 MB per second."""
        held = []
        while True:
            held.append(bytes([1]) * (1024 * 1024))
            sleep(0.002)

    def hang(self, sleep: Callable[[float], None]) -> NoReturn:
        if self.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            sleep(3600.0)

    def simulate_load(
        self, progress: Callable[[str, float], None], sleep: Callable[[float], None]
    ) -> None:
        """Take the time of a load and fail as the name says."""
        for stage in range(_LOAD_STAGES):
            progress("weights", stage / _LOAD_STAGES)
            sleep(self.load / _LOAD_STAGES)
        if self.load_crash:
            self.crash()
        if self.load_hang:
            self.hang(sleep)
        if self.load_error:
            raise from_info(ErrorInfo(self.load_error, "the fake model was asked not to load"))
        progress("ready", 1.0)

    @property
    def chat(self) -> ChatAbilities:
        return ChatAbilities(
            tools="scripted" if self.tools else "",
            tool_results=self.tools,
            reasoning="scripted",
            reasoning_switch=True,
            late_system=True,
        )

    def info(self, kv: KVSpec) -> ModelInfo:
        size, token_bytes = kv.max_kv_size, self.page_bytes // PAGE_TOKENS
        keep = f" keep {kv.keep}" if kv.keep else ""
        part = KVPart(
            kind="full" if size is None else f"window {size}{keep}",
            layers=1,
            path="pages",
            scheme=kv.name,
            batched=True,
            bytes_per_token=token_bytes if size is None else 0,
            bound_bytes=(size or 0) * token_bytes,
        )
        return ModelInfo(
            architecture="Fake",
            parameters=0,
            context_length=self.context,
            vocab_size=VOCABULARY,
            layers=1,
            dtype="none",
            kv_scheme=kv.name,
            kv_layout="none",
            kv=[part],
            page_bytes=self.page_bytes,
            kv_bytes_per_token=token_bytes,
            attention_path="fake",
            attention_error=0.0,
            has_chat_template=True,
            chat=self.chat,
            embedding=INFO,
            device="none",
        )


def parse(source: str) -> FakeModel:
    """Parse a model's name; ``demo``, ``fake`` or a model's folder is a model without faults."""
    if source in ("demo", "fake") or (source.startswith("/") and paths.is_folder(Path(source))):
        return FakeModel()
    kind, _, settings = source.partition(":")
    if kind != "fake":
        raise UnknownModel(f"the fake engine has no model {source!r}; try fake:tps=100")
    pairs = [setting.partition("=") for setting in settings.split(",") if setting]
    try:
        return msgspec.convert({key: value for key, _, value in pairs}, FakeModel, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(FakeModel.__struct_fields__)
        raise InvalidModel(f"{source}: {error}; the keys are {known}", source=source) from error
