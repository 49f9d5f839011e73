"""Values that both protocols carry: client <-> daemon and daemon <-> worker.

Bytes are integers, durations are seconds (``_s``), token positions count from zero.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.errors import ErrorInfo

Name = Annotated[str, Meta(min_length=1, max_length=256)]
ALIAS_PATTERN = r"^(?!-)[A-Za-z0-9._:/@+-]+\Z"
"""Names go into tables, logs and command lines: nothing there may move the cursor or split them."""
ALIAS_RULE = "may hold letters, digits and ._:/@+- only, and must not start with -"
Alias = Annotated[str, Meta(min_length=1, max_length=256, pattern=ALIAS_PATTERN)]
Bits = Literal[2, 3, 4, 5, 6, 8, 16]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. Temperature 0 is greedy, whatever the rest says."""

    temperature: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0 keeps all tokens."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """The same request with the same seed gives the same tokens; absent: the daemon draws one."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation, for the model's own chat template."""

    role: Literal["system", "user", "assistant"]
    content: str


class KVSpec(msgspec.Struct, frozen=True):
    """How a model's KV cache is stored: bits of keys and of values; 16 is not quantized."""

    k_bits: Bits = 8
    v_bits: Bits = 8

    @property
    def name(self) -> str:
        """The scheme as people write it, such as ``k8v4``."""
        return f"k{self.k_bits}v{self.v_bits}"


class Usage(msgspec.Struct, frozen=True):
    """What a request took, in tokens."""

    prompt_tokens: int
    completion_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found out about its model when it loaded it."""

    architecture: str
    parameters: int
    context_length: int
    vocab_size: int
    layers: int
    dtype: str
    """Of weights and activations, such as ``float32``."""
    kv_scheme: str
    """Such as ``k8v8``."""
    kv_layout: str
    """Such as ``keys per channel, values per token``."""
    page_bytes: int
    """Of one page in all layers."""
    kv_bytes_per_token: int
    attention_path: str
    """Which decode attention was chosen, such as ``reference``."""
    attention_error: float
    """The self-check's relative error against dense attention."""
    has_chat_template: bool
    device: str
    """Such as ``cpu``, ``Apple M4 Max`` or ``NVIDIA H200``."""
    blas: str | None = None
    """The BLAS library that was preloaded, on Linux without an accelerator."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's memory by kind, in bytes."""

    weights: int = 0
    kv_pages: int = 0
    """All pages of the pools, used or free."""
    kv_pages_used: int = 0
    kv_tails: int = 0
    scratch: int = 0
    """Reserved for dequantized layers, flushes and growth."""
    active: int = 0
    """What MLX's allocator counts as in use."""
    cache: int = 0
    """What MLX's allocator keeps for reuse."""
    footprint: int = 0
    """Of the process: phys_footprint on macOS, PSS on Linux."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's counters; the newest one replaces those before it."""

    step: int = 0
    """Steps so far: the heartbeat."""
    rows_running: int = 0
    rows_prefilling: int = 0
    rows_waiting: int = 0
    max_rows_in_step: int = 0
    pages_used: int = 0
    pages_total: int = 0
    flushes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_s: float = 0.0
    """Generated, over the last seconds."""
    memory: MemoryUse = MemoryUse()


ModelState = Literal[
    "stopped", "spawning", "loading", "ready", "draining", "stopping", "backoff", "failed"
]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model in ``status``."""

    name: str
    source: str
    """What it was loaded from: ``demo``, a folder or a Hub id."""
    state: ModelState
    worker_pid: int | None = None
    restarts: int = 0
    kv: KVSpec = KVSpec()
    granted_bytes: int = 0
    requests: int = 0
    """Requests that the daemon holds for it, queued or running."""
    info: ModelInfo | None = None
    stats: WorkerStats = WorkerStats()
    error: ErrorInfo | None = None
    """Why it failed, or why it is in backoff."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine has, in bytes."""

    total: int
    available: int
    accelerator_limit: int | None = None
    """Metal's recommended working set, where there is one."""
    pressure: Literal["normal", "warning", "critical"] = "normal"


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All of ``status``."""

    version: str
    pid: int
    uptime_s: float
    home: str
    state: Literal["serving", "draining"]
    budget_bytes: int
    granted_bytes: int
    footprint_bytes: int
    """Of the daemon process."""
    host: HostMemory
    models: list[ModelStatus]
