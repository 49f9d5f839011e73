"""Chooses the kernels that this process tries (``KVD_ATTENTION``), and serves a model with them.

Whole layers run as blocks, of kernels or of the native library, if the model's logits stay right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from msgspec.structs import replace as restruct

from kvd.worker import decoder_layers
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.launch import Fused, find_language
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.gpu import blocks
from kvd.worker.native import whole_layers
from kvd.worker.serving import probe

VARIABLE = "KVD_ATTENTION"


def plain_only() -> bool:
    """Return whether only plain operations may run attention (``KVD_ATTENTION=reference``)."""
    return os.environ.get(VARIABLE) == "reference"


def find_kernels() -> FusedBackend | None:
    language = find_language()
    return None if language is None else FusedBackend(Fused(language), language.most_buffers)


def serve(
    model: Any, settings: CacheSettings, vocab_size: int, kernels: FusedBackend, *, products: bool
) -> probe.Served:
    """Serve as `probe.serve` does, with layers as blocks of kernels (`blocks`) where possible.

    ``products``: whether kvd's own kernels multiply few rows; without them there are no blocks.
    """
    found, count = _with_blocks(
        model,
        lambda: blocks.fuse(model) if products else 0,
        lambda: probe.serve(model, settings, vocab_size, kernels=kernels),
        lambda found: found.fused is not None and found.fused.used,
    )
    if found.fused is None:
        return found
    return replace(found, fused=restruct(found.fused, layers=count))


def serve_natively(
    model: Any, settings: CacheSettings, vocab_size: int, library: ModuleType | None
) -> probe.Served:
    """Serve as `probe.serve` does, with layers as one operation of the library where possible."""
    found, count = _with_blocks(
        model,
        lambda: 0 if library is None else whole_layers.fuse(model, library),
        lambda: probe.serve(model, settings, vocab_size, library),
        lambda found: found.path == probe.NATIVE,
    )
    return replace(found, path=f"{found.path}, whole layers") if count else found


def _with_blocks(
    model: Any,
    fuse: Callable[[], int],
    serve: Callable[[], probe.Served],
    uses_blocks: Callable[[probe.Served], bool],
) -> tuple[probe.Served, int]:
    """Serve a model with blocks; return also how many layers are blocks.

    The probe compares with mlx-lm's caches, where layers run their own code, so it checks blocks
    too. If it decides against what blocks need, the model is probed again without blocks.
    """
    count = fuse()
    found = serve()
    if count and not uses_blocks(found):
        decoder_layers.unfuse(model)
        count, found = 0, serve()
    return found, count
