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
from kvd.worker.artifacts.checks import Checks
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.fused import Fused
from kvd.worker.attention.kernels.launch import find_language
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.gpu import blocks
from kvd.worker.native import whole_layers
from kvd.worker.serving import fast_paths, probe
from protocol.types import FastPath, FastPathName

VARIABLE = "KVD_ATTENTION"


def plain_only() -> bool:
    """Return whether only plain operations may run attention (``KVD_ATTENTION=reference``)."""
    return os.environ.get(VARIABLE) == "reference"


def find_kernels() -> FusedBackend | None:
    language = find_language()
    return None if language is None else FusedBackend(Fused(language), language.most_buffers)


LAYERS: FastPathName = "whole layers"


def serve(
    model: Any,
    settings: CacheSettings,
    vocab_size: int,
    kernels: FusedBackend,
    *,
    products: bool,
    checks: Checks | None = None,
) -> probe.Served:
    """Serve as `probe.serve` does, with layers as blocks of kernels (`blocks`) where possible.

    ``products``: whether kvd's own kernels multiply few rows; without them there are no blocks.
    """
    found = _with_blocks(
        model,
        lambda: blocks.fuse(model) if products else 0,
        lambda: blocks.obstacle(model) if products else "kvd's own products are not used here",
        lambda count: probe.serve(
            model, settings, vocab_size, kernels=kernels, checks=_checks(checks, count)
        ),
        _obstacle_of_kernels,
    )
    if found.fused is None or found.layers is None:
        return found
    return replace(found, fused=restruct(found.fused, layers=found.layers.layers))


def serve_natively(
    model: Any,
    settings: CacheSettings,
    vocab_size: int,
    library: ModuleType | None,
    checks: Checks | None = None,
) -> probe.Served:
    """Serve as `probe.serve` does, with layers as one operation of the library where possible."""
    found = _with_blocks(
        model,
        lambda: 0 if library is None else whole_layers.fuse(model, library),
        lambda: (
            "there is no native library"
            if library is None
            else (whole_layers.obstacle(model, library))
        ),
        lambda count: probe.serve(
            model, settings, vocab_size, library, checks=_checks(checks, count)
        ),
        lambda found: "" if found.path == probe.NATIVE else _reason(found),
    )
    if found.layers is None or not found.layers.used:
        return found
    return replace(found, path=f"{found.path}, whole layers")


def _obstacle_of_kernels(found: probe.Served) -> str:
    if found.fused is None:
        return _reason(found)
    return "" if found.fused.used else f"fused attention is not used: {found.fused.reason}"


def _reason(found: probe.Served) -> str:
    """Return why attention is not served in the best way."""
    return next(iter(found.reasons.values()), f"attention runs by {found.path}")


def _with_blocks(
    model: Any,
    fuse: Callable[[], int],
    obstacle: Callable[[], str],
    serve: Callable[[int], probe.Served],
    obstacle_of: Callable[[probe.Served], str],
) -> probe.Served:
    """Serve a model with blocks, and note whether its layers use them.

    The probe compares with mlx-lm's caches, where layers run their own code, so it checks blocks
    too. If it decides against what blocks need, the model is probed again without blocks.
    """
    count = fuse()
    if not count:
        return replace(serve(0), layers=fast_paths.declined(LAYERS, "model", obstacle()))
    found = serve(count)
    if why := obstacle_of(found):
        decoder_layers.unfuse(model)
        return replace(serve(0), layers=fast_paths.declined(LAYERS, "results", why))
    return replace(found, layers=FastPath(name=LAYERS, used=True, layers=count))


def _checks(checks: Checks | None, blocks: int) -> Checks:
    return (checks or Checks()).under(f"{blocks} blocks")
