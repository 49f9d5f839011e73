"""What the command line of `kvd serve` says, and how it travels to the process that serves."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvd.host.home import Home
from protocol.types import KVSpec

Attention = Literal["auto", "reference"]
"""What attends in decode steps: the best that is right, or MLX's plain operations alone."""


class Options(msgspec.Struct, frozen=True):
    """What the command line lays over the configuration."""

    home: Home
    budget_bytes: int | None = None
    models: tuple[str, ...] = ()
    """Loaded at start, in place of those of the configuration."""
    kv: KVSpec = KVSpec()
    """Of those models."""
    attention: Attention | None = None
    """In place of the configuration's."""
    http: str | None = None
    """Where HTTP answers, in place of the configuration's: ``off``, ``PORT`` or ``HOST:PORT``."""
    fake: bool = False
    """Workers run the fake engine: no model, no MLX."""

    def packed(self) -> str:
        """Return all of it as one word."""
        return msgspec.json.encode(self, enc_hook=os.fsencode).decode()

    @classmethod
    def unpacked(cls, word: str) -> Options:
        """Return what was packed."""
        return msgspec.json.decode(word, type=cls, dec_hook=_path)


def _path(_kind: Any, text: str) -> Path:
    # Paths need not be UTF-8, so they travel as their bytes.
    return Path(os.fsdecode(base64.b64decode(text)))
