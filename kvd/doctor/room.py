"""Whether there is memory for both sides of the speed comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.doctor.scene import Scene
from kvd.host import memory
from kvd.host.units import format_bytes
from protocol import memory_bounds, model_folder
from protocol.errors import InsufficientMemory
from protocol.types import DaemonStatus

PROCESS_BYTES = 384 * 1024 * 1024
"""Interpreter and libraries of one side (measured: 250 MiB with transformers, on Linux)."""
_CHUNK = 2048
"""Prompt tokens that mlx-lm computes at once."""
_KV_COPIES = 2
"""mlx-lm copies its caches when rows join a batch."""


@dataclass(frozen=True)
class Room:
    """Bytes that each side may take."""

    kvd: int
    mlx_lm: int


def find(scene: Scene, folder: Path, rows: int, tokens: int) -> Room:
    """Return the memory of each side for ``rows`` of ``tokens``.

    Raises `InsufficientMemory` if both sides do not fit into the budget, or into what a running
    daemon leaves of it. Raises the `KvdError` of a broken model.
    """
    on_cpu = scene.computes_on_cpu is not False
    config = model_folder.read_config(folder)
    weights = model_folder.read_weights(model_folder.weight_files(folder))
    stored = weights.in_memory(4 if on_cpu else None)
    step = memory_bounds.step_bytes(config, _CHUNK, rows, on_cpu=on_cpu)
    kv = rows * tokens * kv_bytes(config, 4 if on_cpu else 2)
    one = (
        PROCESS_BYTES
        + stored
        + step
        + memory_bounds.freed_bytes(on_cpu=on_cpu, cuda=scene.platform != "darwin")
    )
    needed = Room(kvd=one + kv, mlx_lm=one + _KV_COPIES * kv)
    total, free = needed.kvd + needed.mlx_lm, available(scene)
    if total > free:
        advice = "choose a smaller model with --model"
        if isinstance(scene.status, DaemonStatus):
            advice = f"stop the daemon (`kvctl shutdown`), or {advice}"
        raise InsufficientMemory(
            f"kvd and mlx-lm need about {format_bytes(total)} side by side, and "
            f"{format_bytes(free)} are free; {advice}"
        )
    return Room(kvd=free - needed.mlx_lm, mlx_lm=needed.mlx_lm)


def available(scene: Scene) -> int:
    """Return the bytes of the budget, or those that a running daemon's budget leaves."""
    host, status = scene.host, scene.status
    limit = host.accelerator_limit
    free = host.available if limit is None else min(limit, host.available)
    if memory.reader().separate and limit is not None:
        free = limit
    if isinstance(status, DaemonStatus):
        one = status.devices[0] if status.devices else status  # MLX computes on the first GPU
        return max(0, free - max(0, one.budget_bytes - one.granted_bytes))
    return min(free, scene.served.budget_bytes or memory.default_budget(host))


def kv_bytes(config: dict[str, Any], itemsize: int) -> int:
    """Return the bytes of one token in all layers, as mlx-lm keeps it."""
    text = config.get("text_config") or config
    layers = _number(text, "num_hidden_layers", "n_layers", "n_layer") or 1
    heads = _number(text, "num_attention_heads", "n_head", "n_heads") or 1
    width = _number(text, "hidden_size", "n_embd", "d_model") or 1
    kv_heads = _number(text, "num_key_value_heads", "num_kv_heads") or heads
    head = _number(text, "head_dim") or -(-width // heads)
    return 2 * layers * kv_heads * head * itemsize


def _number(config: dict[str, Any], *names: str) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
