"""What the selftest measures of kvd and mlx-lm, as the report contains it."""

from __future__ import annotations

import statistics

import msgspec

from protocol.speed import Kind
from protocol.types import FastPath, FusedAttention


class Samples(msgspec.Struct, frozen=True):
    """Tokens per second of one side in each round, in order, and their median and range."""

    tok_s: list[float]
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, tok_s: list[float]) -> Samples:
        return cls(tok_s, statistics.median(tok_s), min(tok_s), max(tok_s))


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One size, measured on both sides in turn."""

    kind: Kind
    rows: int
    prompt: int
    """Tokens of each row's prompt."""
    output: int
    """Tokens that each row generates."""
    kvd: Samples | None = None
    mlx_lm: Samples | None = None
    ratio: float | None = None
    """Median of kvd divided by the median of mlx-lm."""
    ratio_low: float | None = None
    """Lowest ratio of a round."""
    ratio_high: float | None = None
    skipped: str = ""
    """Why there are no measurements."""

    @classmethod
    def of(cls, size: Cell, kvd: list[float], mlx_lm: list[float]) -> Cell:
        """Return a size with its measurements, one of each side per round."""
        ours, theirs = Samples.of(kvd), Samples.of(mlx_lm)
        rounds = [one / other for one, other in zip(kvd, mlx_lm, strict=True)]
        return cls(
            kind=size.kind,
            rows=size.rows,
            prompt=size.prompt,
            output=size.output,
            kvd=ours,
            mlx_lm=theirs,
            ratio=ours.median / theirs.median,
            ratio_low=min(rounds),
            ratio_high=max(rounds),
        )

    @property
    def name(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{self.kind}, {rows}, {self.prompt} tokens"


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Load and memory of one side."""

    load_s: float
    """Seconds from the start of the process until its model was ready."""
    load: dict[str, float]
    """Seconds of each part of the load, in order. ``python`` is the interpreter's start."""
    dtype: str
    loaded_bytes: int
    """Bytes in use according to MLX's allocator, after the load."""
    mlx_peak_bytes: int
    """Most bytes of MLX's allocator."""
    process_peak_bytes: int
    """Most resident bytes of the process."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How kvd serves the model, as its engine reports."""

    architecture: str
    parameters: int
    layers: int
    context_length: int
    kv_scheme: str
    attention_path: str
    attention_error: float
    """Relative error against dense attention, from the self-check."""
    device: str
    fused: FusedAttention | None
    paths: list[FastPath]
    """Faster ways to compute, and the engine's reason for each that it did not choose."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """kvd compared with mlx-lm in one run."""

    model: str
    """``demo``, a Hub id, or ``a folder``."""
    beside_daemon: bool
    """Whether a daemon ran at the same time, which makes the numbers less certain."""
    served: Served
    kvd: Side
    mlx_lm: Side
    cells: list[Cell]
