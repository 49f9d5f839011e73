"""What a worker is charged for beside weights, interpreter and pages: bounds, from its config.

Shared by workers, which add what they measured, and by forecasts of models that are not loaded.
"""

from __future__ import annotations

from typing import Any

FREED_BYTES_ON_CPU = 2 * 1024 * 1024
"""Freed buffers that MLX keeps on the CPU.

There malloc keeps them as well, and joins what lies side by side, which MLX never does: with 128
MiB a worker held 90 MB more and took more processor time, in decoding and in prefill, with the
embedded model and with layers of 1024.
"""
FREED_BYTES = 128 * 1024 * 1024
"""The same where the device has its own memory calls, which are slow."""
MAX_TRACES = 64
"""Compiled functions that are kept; the one that was not used for the longest time goes first."""
TRACE_BYTES = 160 * 1024
"""What a compiled step holds for one layer: its graph, on the host (measured: 140 KB)."""
NATIVE_TRACE_BYTES = 24 * 1024
"""The same where a layer's attention is one operation of `kvd.worker.native` (19 KB)."""
CHUNK_COPIES = 8
"""Of the widest activations of prefilled tokens, alive at once (measured: 6)."""
ROW_SPLITS = 65
"""Parts in which kernels attend to a row while these may grow (`kvd.worker.cache.splits`)."""
SPLIT_TOKENS = 4096
"""Tokens that one part has at most."""
PARTS_ALIVE = 6
"""Layers whose parts are there at once (measured, of lazy copies: 5.6 of 12 layers)."""
LOOSE_BYTES = 32 * 1024 * 1024
"""Holes in malloc's heap, requests, and what libraries load when they are first used."""


def freed_bytes(*, on_cpu: bool) -> int:
    """Return how many bytes of freed buffers MLX may keep for reuse."""
    return FREED_BYTES_ON_CPU if on_cpu else FREED_BYTES


def scratch_bytes(scratch: int, *, native: bool, parts: int = 0) -> int:
    """Return what of a step's scratch is charged, in bytes.

    kvd's own attention reads pages as they lie: it needs only the quarter that stepping down may
    take (`kvd.worker.cache.model_cache.CacheSettings`). ``parts``: what decode steps take
    (`parts_bytes`); a prefill step, which the scratch is for, never runs beside one.
    """
    return max(scratch // 4 if native else scratch, parts)


def parts_bytes(config: dict[str, Any], rows: int, context: int) -> int:
    """Bound what decode attention by kernels takes for results that are not joined yet.

    Of so many rows, one of which is as long as the context; padded as compiled steps are.
    """
    text = config.get("text_config") or config
    heads = _first(text, "num_attention_heads", "n_head", "n_heads")
    width = _first(text, "hidden_size", "n_embd", "d_model")
    size = text.get("head_dim") or width // max(1, heads)
    splits = (rows * ROW_SPLITS + context // SPLIT_TOKENS) * 5 // 4
    layers = min(PARTS_ALIVE, text.get("num_hidden_layers") or PARTS_ALIVE)
    # Sums of each channel, the largest logit, and the sum of weights: float32.
    return layers * splits * heads * (size + 2) * 4


def _first(config: dict[str, Any], *names: str) -> int:
    """Return a number that configurations know by several names; 0 if this one has none."""
    return next((int(config[name]) for name in names if config.get(name)), 0)


def traces_bytes(layers: int, *, native: bool) -> int:
    """Return what the traces of compiled steps come to hold."""
    return MAX_TRACES * layers * (NATIVE_TRACE_BYTES if native else TRACE_BYTES)


def step_bytes(config: dict[str, Any], tokens: int, *, on_cpu: bool) -> int:
    """Bound what a step's prefill takes outside attention; ``tokens``: the scheduler's budget."""
    text = config.get("text_config") or config
    experts = text.get("num_experts_per_tok") or 1
    widths = [
        text.get("hidden_size"),
        text.get("intermediate_size"),
        (text.get("num_attention_heads") or 0) * (text.get("head_dim") or 0),
        (text.get("moe_intermediate_size") or 0) * experts,
    ]
    width = max((one for one in widths if isinstance(one, int)), default=0)
    return CHUNK_COPIES * tokens * width * (4 if on_cpu else 2)
