"""Chooses the kernels that this process tries (``KVD_ATTENTION``), and serves a model with them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as restruct

from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.launch import Fused, find_language
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.gpu import blocks
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
    The probe compares with mlx-lm's caches, where layers run their own code, so it checks blocks
    too. If it decides against kernels, the model is probed again without blocks.
    """
    count = blocks.fuse(model) if products else 0
    found = probe.serve(model, settings, vocab_size, kernels=kernels)
    if count and not (found.fused and found.fused.used):
        blocks.unfuse(model)
        count = 0
        found = probe.serve(model, settings, vocab_size, kernels=kernels)
    if found.fused is None:
        return found
    return replace(found, fused=restruct(found.fused, layers=count))
