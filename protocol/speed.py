"""Messages between `kvctl doctor --selftest` and the processes that measure speed for it.

Each side, kvd or mlx-lm, is a process with one model. It first sends `Loaded`, then answers each
`Task` with `Ran`. `Failed` ends it. Messages are lines of JSON on a socketpair.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.types import ModelInfo

Kind = Literal["prefill", "decode"]
SideName = Literal["kvd", "mlx-lm"]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Run prompts of random tokens together; each row starts with its own prompt."""

    kind: Kind
    rows: int
    prompt: int
    """Tokens of each prompt."""
    output: int
    """Tokens that each row generates; 1 for ``prefill``."""
    seed: int
    """Different seeds give different prompts; both sides get the same ones."""


class Loaded(msgspec.Struct, tag="loaded", frozen=True, kw_only=True):
    """The model is ready."""

    seconds: dict[str, float]
    """Duration of each part of the load, in order."""
    dtype: str
    """Type of weights and activations, such as ``float32``."""
    active_bytes: int
    """Bytes in use according to MLX's allocator."""
    info: ModelInfo | None = None
    """What kvd found out about the model; absent for mlx-lm."""


class Ran(msgspec.Struct, tag="ran", frozen=True, kw_only=True):
    """A task is done. Counts and times of ``decode`` begin when all rows have their first token."""

    tokens: int
    """Prompt tokens for ``prefill``, generated tokens for ``decode``; of all rows."""
    seconds: float
    mlx_peak_bytes: int
    """Most bytes of MLX's allocator since the process began."""
    process_peak_bytes: int
    """Most resident bytes of the process."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The side could not load its model or run a task."""

    text: str
    short: bool = False
    """Whether memory was short."""


Answer = Loaded | Ran | Failed
