"""The command-line options of `kvd serve`, and their encoding for the process that serves."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvd.host.home import Home
from protocol.kv import KVSpec

Attention = Literal["auto", "reference"]
"""Attention in decode steps: the fastest backend that passes its checks, or MLX's operations."""


class Options(msgspec.Struct, frozen=True):
    """Options that override the configuration."""

    home: Home
    budget_bytes: int | None = None
    models: tuple[str, ...] = ()
    """Models to load at start, instead of those of the configuration."""
    kv: KVSpec | None = None
    """KV settings of ``models``; None: those of the configuration, or the defaults."""
    attention: Attention | None = None
    host: str | None = None
    """Address of HTTP."""
    port: int | None = None
    """Port of HTTP."""
    default_port: int | None = None
    """Port of HTTP from KVD_PORT; unlike ``port``, it does not enable HTTP."""
    no_http: bool = False
    fake: bool = False
    """Workers run the fake engine: no model, no MLX."""

    def packed(self) -> str:
        return msgspec.json.encode(self, enc_hook=os.fsencode).decode()

    @classmethod
    def unpacked(cls, argument: str) -> Options:
        return msgspec.json.decode(argument, type=cls, dec_hook=_path)


def _path(_kind: Any, text: str) -> Path:
    # Paths need not be UTF-8, so they are encoded as bytes.
    return Path(os.fsdecode(base64.b64decode(text)))
