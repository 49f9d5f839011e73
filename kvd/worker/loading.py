"""What loading a model asks of the daemon and tells it: grants, settings, and what it got."""

from __future__ import annotations

import os

import mlx.core as mx

from kvd.worker import describe, model, probe, verdicts
from kvd.worker.budget import mebibytes
from kvd.worker.cache.composite import CacheSettings
from kvd.worker.cache.scheme import floors_of, ladder_of
from kvd.worker.engine import AskGrant
from protocol.errors import InsufficientMemory
from protocol.types import ModelInfo
from protocol.worker import Grant, LoadModel


def settings_of(command: LoadModel, verdict: verdicts.Verdict | None) -> CacheSettings:
    """Return how the model's cache is kept; a calibration may lift the ladder."""
    kv = command.kv
    return CacheSettings(
        ladder=tuple(verdicts.lift(ladder_of(kv), verdict)),
        floors=lambda layers: floors_of(kv, layers),
        quantized_start=kv.quantized_kv_start,
        max_size=kv.max_kv_size,
        keep=kv.keep if kv.max_kv_size else 0,
        scratch=command.attention_scratch,
    )


def info_of(
    command: LoadModel,
    loaded: model.LoadedModel,
    served: probe.Served,
    verdict: verdicts.Verdict | None,
    *,
    has_chat_template: bool,
) -> ModelInfo:
    """Return what is told of a loaded model."""
    cache = served.runner.cache
    parts = describe.parts(served, command.prefill_chunk)
    growing = sum(part.bytes_per_token for part in parts)
    return ModelInfo(
        architecture=str(loaded.config["model_type"]),
        parameters=loaded.parameters,
        context_length=loaded.context_length,
        vocab_size=loaded.vocab_size,
        layers=len(loaded.model.layers),
        dtype=describe.dtype_name(loaded.model),
        kv_scheme=cache.scheme.name,
        kv_layout=describe.layout(cache),
        page_bytes=64 * growing,
        kv_bytes_per_token=growing,
        attention_path=served.path + (", compiled steps" if served.runner.compiled else ""),
        attention_error=served.error,
        kv=parts,
        kv_ladder=describe.ladder(cache),
        kv_calibrated=None if verdict is None else verdict.lowest,
        has_chat_template=has_chat_template,
        device=_device(),
        blas=os.environ.get("KVD_BLAS_PRELOADED"),
    )


def demand(ask_grant: AskGrant, total_bytes: int, reason: str) -> Grant:
    """Return the grant of so many bytes; raises `InsufficientMemory` if it is denied."""
    grant = ask_grant(total_bytes, reason)
    if not grant.granted:
        raise InsufficientMemory(
            f"the model needs {mebibytes(total_bytes)} ({reason}); of the budget of"
            f" {mebibytes(grant.budget_bytes)} only {mebibytes(grant.available_bytes)} are free:"
            " unload a model or raise the budget",
            needed_bytes=total_bytes,
            budget_bytes=grant.budget_bytes,
            available_bytes=grant.available_bytes,
        )
    return grant


def _device() -> str:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return str(mx.device_info().get("device_name", "gpu"))
