"""The space of a worker's segments: a digest of everything besides the prompt that they depend on.

Two workers with equal spaces would write the same bytes for the same prompt, so each can continue
from what the other has stored. What differs only in ways that no segment shows is left out: names
and folders, lower precision levels (only rows at the top level leave checkpoints), limits of
memory and of the context, and everything about decoding.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.store import KVStore
from kvd.worker.native import build
from protocol import segment_file
from protocol.types import ModelInfo
from protocol.worker import LoadModel

SPACE_BYTES = 16


def space_of(fingerprint: bytes, cache: ModelCache, info: ModelInfo, command: LoadModel) -> bytes:
    """Return the `SPACE_BYTES` of a loaded model.

    ``fingerprint``: of the weights (`kvd.worker.serving.fingerprint`). ``cache``: as the model is
    served. The arguments must be those of one load.
    """
    parts = describe(fingerprint, cache, info, command)
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=SPACE_BYTES).digest()


def describe(
    fingerprint: bytes, cache: ModelCache, info: ModelInfo, command: LoadModel
) -> dict[str, Any]:
    """Return what the space is a digest of, in a form for logs."""
    native = info.device == "cpu" and info.native == "on"
    return {
        # What the records contain, and how kvd computes it: raised when either changes.
        "version": segment_file.VERSION,
        # Other weights or another configuration give other keys and values.
        "model": fingerprint.hex(),
        # Activations are rounded to this type, and tails are stored in it.
        "dtype": info.dtype,
        # mlx-lm has the models' code, and MLX the operations. Versions differ in rounding.
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        # Each device has kernels of its own, which sum in another order.
        "device": info.device,
        # So do kvd's C++ operations: their sources, the compiler's options and the processor.
        "native": build.key() if native else info.native,
        # So do plain operations, and the variants of attention over pages.
        "attention": info.attention_path,
        # On the CPU, BLAS multiplies; it chooses its kernels by the processor's type.
        "blas": None if info.blas is None else Path(info.blas).resolve().name,
        "blas_core": os.environ.get("OPENBLAS_CORETYPE"),
        # A chunk attends exactly to its own tokens, and to quantized ones before it. Its end is
        # also where segments may begin and end.
        "prefill_chunk": command.prefill_chunk,
        # Attention over a long row is computed in parts of this size, each rounded by itself.
        "scratch": cache.settings.prefill_scratch,
        # Rows below this length have dense pages.
        "quantized_start": cache.settings.quantized_start,
        "stores": [
            _store(store, access.value)
            for store, access in zip(cache.stores, cache.access.values(), strict=True)
        ],
        "states": [
            [[list(shape), str(dtype)] for shape, dtype in zip(p.shapes, p.dtypes, strict=True)]
            for p in cache.layout.states()
        ],
    }


def _store(store: KVStore, access: str) -> dict[str, Any]:
    """Return how the layers of one attention kind keep tokens, at the top precision level.

    Packings are those in use: calibration and floors may have raised the configured schemes.
    """
    levels = 2 if store.quantized_start else 1
    return {
        "kind": astuple(store.kind),
        "access": access,
        "dtype": str(store.dtype),
        "layers": [
            {
                "geometry": astuple(layer.geometry),
                "packings": [
                    [astuple(pool.key_packing), astuple(pool.value_packing)]
                    for pool in layer.pools[:levels]
                ],
            }
            for layer in store.layers
        ],
    }
