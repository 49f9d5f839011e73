"""Loading a model: memory requests, settings, and the description that the daemon gets.

A worker's *base* is charged permanently: what the process holds once it has loaded, and what it may
use temporarily or grow by besides its pages. It is measured where possible.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec

from kvd.worker.artifacts.checks import Checks
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.cache import device_pages
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme, floors_of
from kvd.worker.cache.segment_records import record_bytes
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.device import on_cpu, on_cuda
from kvd.worker.engine import AskGrant, ReportProgress
from kvd.worker.native.step import Library
from kvd.worker.prefix.segment_io import STAGED_RECORDS, STAGING_BYTES
from kvd.worker.process import memory, shortage
from kvd.worker.scheduling.budget import load_refusal
from kvd.worker.serving import calibration, describe, fast_paths, kernel_choice, model_files, probe
from kvd.worker.serving.kernel_check import describe_verdict
from kvd.worker.serving.runner import Runner
from protocol import memory_bounds, model_folder
from protocol.costs import Costs
from protocol.embedding import EmbeddingInfo
from protocol.types import BitsByLayer, ChatAbilities, FusedAttention, MemoryUse, ModelInfo
from protocol.worker import Grant, LoadModel

CHECKS_BYTES = 32 * 1024 * 1024
"""Least memory reserved for converting weights and checking attention (measured: 16 MB)."""

_log = logging.getLogger("kvd.worker")


def settings_of(
    command: LoadModel, schemes: Sequence[Scheme], mixes: Sequence[tuple[Scheme, ...] | None]
) -> CacheSettings:
    """Return the settings of the model's cache, with these precision levels and bits by layer."""
    kv = command.kv
    return CacheSettings(
        schemes=tuple(schemes),
        mixes=tuple(mixes),
        floors=lambda layers: floors_of(kv, layers),
        quantized_start=kv.quantized_kv_start,
        max_size=kv.max_kv_size,
        keep=kv.keep if kv.max_kv_size else 0,
        scratch=command.attention_scratch,
    )


def serve(
    loaded: model_files.LoadedModel,
    settings: CacheSettings,
    library: ModuleType | None,
    progress: ReportProgress,
    checks: Checks | None = None,
) -> probe.Served:
    """Find the best allowed way to serve the model on this device (`probe.serve`)."""
    kernels = kernel_choice.find_kernels()
    if kernel_choice.plain_only():
        found = probe.serve(loaded.model, settings, loaded.vocab_size, checks=checks)
        off = FusedAttention(used=False, reason="switched off", cause="switched_off")
        layers = fast_paths.declined("whole layers", "switched_off", "switched off")
        found = replace(found, layers=layers, fused=None if kernels is None else off)
    elif kernels is None:
        found = kernel_choice.serve_natively(
            loaded.model, settings, loaded.vocab_size, library, checks
        )
    else:
        found = kernel_choice.serve(
            loaded.model, settings, loaded.vocab_size, kernels,
            products=loaded.own_products, checks=checks,
        )  # fmt: skip
        if found.fused is not None and found.fused.compile_s:
            progress(f"attention kernels compiled in {found.fused.compile_s:.1f} s", 0.9)
    _log.info("attention: %s, error %.2g", found.path, found.error)
    if found.fused is not None:
        _log.info("%s", describe_verdict(found.fused))
    if isinstance(cache := found.runner.cache, ModelCache):
        for layer in (layer for store in cache.stores for layer in store.layers):
            for pool in layer.pools:
                device_pages.prepare(pool.arrays())
    return found


def info_of(
    command: LoadModel,
    loaded: model_files.LoadedModel,
    served: probe.Served,
    calibrated: calibration.CalibrationResult | None,
    bits: BitsByLayer,
    *,
    native: str | None,
    has_chat_template: bool,
    chat: ChatAbilities | None,
    costs: Costs | None,
    embedding: EmbeddingInfo | None,
) -> ModelInfo:
    runner, cache = served.runner, served.runner.cache
    features = {"compiled steps": runner.compiled, "packed prefill": runner.packs}
    parts = describe.parts(served, runner.pass_tokens(command.prefill_chunk), command.ranks)
    ranks = [f"{command.ranks} ranks"] if command.ranks > 1 else []
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
        attention_path=", ".join(
            [served.path, *(name for name, on in features.items() if on), *ranks]
        ),
        attention_error=served.error,
        fused=served.fused,
        kv=parts,
        kv_schemes=describe.schemes(cache),
        kv_mixes=describe.mixes(cache),
        kv_bits=bits,
        kv_calibrated=None if calibrated is None else calibrated.lowest,
        has_chat_template=has_chat_template,
        chat=chat,
        device="cpu" if on_cpu() else str(mx.device_info().get("device_name", "gpu")),
        blas=os.environ.get("KVD_BLAS_PRELOADED"),
        native=native,
        paths=describe.paths(served, native),
        costs=costs,
        embedding=embedding,
    )


def freed_bytes(command: LoadModel) -> int:
    """Return how many bytes of freed buffers MLX may keep for reuse on this device."""
    return memory_bounds.freed_bytes(command.attention_scratch, on_cpu=on_cpu(), cuda=on_cuda())


def has_separate_memory() -> bool:
    """Return whether the device has memory of its own, for which the budget is."""
    return not on_cpu() and not mx.metal.is_available()


def load_bytes(headers: model_files.Headers, command: LoadModel, *, packed: bool = False) -> int:
    """Return an upper estimate of the bytes of all ranks' processes while they load the model.

    While weights are converted, some exist twice: those that are read together, and one more.
    Later, the checks need memory besides the weights. The scratch, which nothing else uses yet, has
    room for the checks and for the weights that are read together.
    """
    weights = headers.packed_bytes if packed else headers.weights_bytes
    scratch = checks_bytes(headers, command, packed=packed)
    footprint = memory.footprint() + freed_bytes(command) + memory_bounds.LOOSE_BYTES
    others = (command.ranks - 1) * (footprint + scratch + _replicated_bytes(headers))
    # The tokenizer is loaded before the weights are read.
    tokenizer = model_folder.tokenizer_bytes(headers.path)
    held = weights + scratch + memory_bounds.TOKENIZER_HELD * tokenizer
    peak = max(held, memory_bounds.TOKENIZER_PEAK * tokenizer)
    return footprint + peak + others


def _replicated_bytes(headers: model_files.Headers) -> int:
    """Return an upper estimate of the weights that every rank holds: embeddings and head."""
    weights = headers.weights
    converted = headers.weights_bytes * 2 * weights.largest_bytes // max(1, weights.stored_bytes)
    return min(headers.weights_bytes, converted)


def checks_bytes(headers: model_files.Headers, command: LoadModel, *, packed: bool) -> int:
    """Return how many of `load_bytes` are for converting weights, and later for the checks."""
    weights = headers.packed_bytes if packed else headers.weights_bytes
    native = packed and not kernel_choice.plain_only()
    scratch = memory_bounds.scratch_bytes(command.attention_scratch, native=native)
    scratch = max(scratch, min(command.attention_scratch, CHECKS_BYTES))
    if on_cpu():
        largest = headers.weights.largest_bytes
        scratch = max(scratch, largest + min(model_files.READ_BYTES, weights))
    return scratch


def probe_bytes(
    headers: model_files.Headers,
    loaded: model_files.LoadedModel,
    command: LoadModel,
    *,
    packed: bool,
) -> int:
    """Return how many bytes the probe of layers may hold at load, and in an idle worker."""
    native = packed and not kernel_choice.plain_only()
    step = memory_bounds.step_bytes(
        loaded.config, command.prefill_chunk, command.max_rows, on_cpu=on_cpu()
    )
    idle = step + memory_bounds.scratch_bytes(command.attention_scratch, native=native)
    return min(idle, checks_bytes(headers, command, packed=packed))


def with_chunk(command: LoadModel, runner: Runner) -> LoadModel:
    """Return the command with the chunk of this model's passes."""
    if runner.packs or command.lone_chunk is None:
        return command
    return msgspec.structs.replace(command, prefill_chunk=command.lone_chunk)


def base_bytes(loaded: model_files.LoadedModel, command: LoadModel, runner: Runner) -> int:
    """Return the bytes that this worker is charged besides its pages, measured after loading.

    The cache must have no pages. Returns free memory to the system first.
    """
    shortage.give_back()
    held = memory.footprint_now()
    if has_separate_memory():
        held += mx.get_active_memory()
    step = memory_bounds.step_bytes(
        loaded.config,
        runner.pass_tokens(command.prefill_chunk),
        command.max_rows,
        on_cpu=on_cpu(),
        whole_logits=0 if runner.splits_head else command.prefill_chunk,
    )
    step += _traces_bytes(runner) + scratch_bytes(loaded, command, runner)
    step += waiting_bytes(runner, command.prefill_chunk)
    if command.segments_folder is not None and command.prefix_store_on:
        step += staging_bytes(runner.cache)
    return held + freed_bytes(command) + memory_bounds.LOOSE_BYTES + step


def waiting_bytes(runner: Runner, chunk: int) -> int:
    """Return the bytes of a prefill pass's pages and tails before they are written."""
    if not isinstance(runner.cache, ModelCache):
        return 0
    layers = [layer for store in runner.cache.stores for layer in store.layers]
    sizes = [layer.geometry.dense_bytes(1) for layer in layers]
    tokens = runner.pass_tokens(chunk)
    return memory_bounds.waiting_bytes(sum(sizes), max(sizes, default=0), tokens, chunk)


def staging_bytes(cache: Any) -> int:
    """Return the bytes of records between the engine and the threads of the prefix store."""
    # One segment is read while another is written. Tails and states are one record, which has
    # memory of its own if it is larger than the others' memory.
    memory, rest = record_memory_bytes(cache), int(cache.costs.checkpoint_bytes)
    # A record above the limit is staged alone, while the engine holds the next one.
    page_records = 2 * record_bytes(cache) if isinstance(cache, ModelCache) else 0
    return memory + (rest if rest > memory else 0) + max(STAGING_BYTES, rest, page_records)


def record_memory_bytes(cache: Any) -> int:
    """Return the bytes of the memory that records of stored prefixes are read into."""
    if not isinstance(cache, ModelCache):
        return STAGING_BYTES
    return max(STAGING_BYTES, STAGED_RECORDS * record_bytes(cache))


def scratch_bytes(loaded: model_files.LoadedModel, command: LoadModel, runner: Runner) -> int:
    parts, native = 0, _is_native(runner)
    if isinstance(runner.cache, ModelCache) and isinstance(runner.cache.backend, FusedBackend):
        parts = memory_bounds.parts_bytes(loaded.config, command.max_rows, loaded.context_length)
    return memory_bounds.scratch_bytes(command.attention_scratch, native=native, parts=parts)


def _traces_bytes(runner: Runner) -> int:
    if not runner.compiled:
        return 0
    layers = [layer for store in runner.cache.stores for layer in store.layers]
    return memory_bounds.traces_bytes(len(layers), native=_is_native(runner))


def _is_native(runner: Runner) -> bool:
    cache = runner.cache
    return isinstance(cache, ModelCache) and all(
        isinstance(store.backend, Library) for store in cache.stores
    )


def limit_context(loaded: model_files.LoadedModel, most: int | None) -> model_files.LoadedModel:
    if most is None or most >= loaded.context_length:
        return loaded
    return replace(loaded, context_length=most)


def require_grant(ask_grant: AskGrant, total_bytes: int, reason: str) -> Grant:
    grant = ask_grant(total_bytes, reason)
    if not grant.granted:
        raise load_refusal(total_bytes, reason, grant)
    return grant


def memory_use(cache: Any, *, weights: int, scratch: int, ranks: int) -> MemoryUse:
    """Return the memory by kind, and restart the measurement of its peak.

    ``cache``: `ModelCache` or `MlxLmCache`. MLX's counts are this process's, times ``ranks``.
    """
    usage = cache.usage
    peak_bytes = mx.get_peak_memory()  # since the previous call
    mx.reset_peak_memory()
    return MemoryUse(
        weights=weights,
        kv_pages=usage.pages_bytes,
        kv_pages_used=usage.used_bytes,
        kv_levels=usage.level_bytes,
        kv_tails=usage.tails_bytes + cache.snapshots.nbytes,
        scratch=scratch,
        active=ranks * mx.get_active_memory(),
        peak=ranks * peak_bytes,
        cache=ranks * mx.get_cache_memory(),
    )
