"""Loads and checks a model, within memory that the daemon grants first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvd.worker import lean_imports
from kvd.worker.artifacts import modules
from kvd.worker.artifacts.checks import Checks
from kvd.worker.cache import pool
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import schemes_of
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.device import on_cuda
from kvd.worker.engine import AskGrant, ReportProgress
from kvd.worker.gang import part
from kvd.worker.gang.leader import EngineRunner, Gang, LeaderRunner
from kvd.worker.grammar.compiler import Compiler, ProcessMemory
from kvd.worker.native import activation
from kvd.worker.prefix.cache import PrefixCache
from kvd.worker.prefix.tree import PrefixTree
from kvd.worker.process import memory, shortage
from kvd.worker.process.cpu_limit import limit_cpu
from kvd.worker.process.memory_limit import limit
from kvd.worker.sampling import direct_draws, sampler
from kvd.worker.scheduling.admission import Admission
from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.scheduler import ReservationSizes, Scheduler
from kvd.worker.serving import (
    bit_choice,
    calibration,
    loading,
    mlx_modules,
    model_files,
    probe,
)
from kvd.worker.serving.bit_choice import LayerBits
from kvd.worker.serving.check_key import open_checks
from kvd.worker.serving.describe import costs_of, dtype_name
from kvd.worker.serving.embedding_rules import EmbeddingRules, find_rules
from kvd.worker.serving.fingerprint import fingerprint
from kvd.worker.text import tokenizer_cache
from kvd.worker.text.end_tokens import end_tokens
from kvd.worker.text.template import TEMPLATE_BYTES, TEMPLATE_SECONDS
from kvd.worker.text.text import Text
from kvd.worker.text.tokenizer_record import TokenizerRecord
from protocol import memory_bounds
from protocol.costs import Costs
from protocol.pages import FIRST_ROWS, SLAB_PAGES
from protocol.types import BitsByLayer
from protocol.worker import LoadModel


@dataclass(frozen=True, eq=False)
class Serving:
    """How a model is served."""

    loaded: model_files.LoadedModel
    served: probe.Served
    runner: EngineRunner
    """The runner that the engine uses: that of ``served``, or a `LeaderRunner` in front of it."""
    verdict: calibration.CalibrationResult | None
    bits: BitsByLayer
    checks: Checks
    """Results that the next load of this model uses."""
    sums: part.Measured | None = None
    """Bytes of all ranks; None: the model has one process."""
    probing: bit_choice.Probing | None = None
    """The rest of the probe of layers, for an idle worker; None: there is none."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model that is loaded and checked."""

    loaded: model_files.LoadedModel
    serving: Serving
    native: str | None
    """``on`` if native operations are used, else the reason; None if the device has none."""
    weights_bytes: int
    text: Text
    fingerprint: bytes | None
    """Identifies the weights in `kvd.worker.prefix.space`; None without a prefix store."""
    embedding_rules: EmbeddingRules
    compiler: Compiler
    """Compiles grammars for its vocabulary."""

    @property
    def runner(self) -> EngineRunner:
        return self.serving.runner


def load_model(
    command: LoadModel, progress: ReportProgress, ask_grant: AskGrant, gang: Gang | None = None
) -> Model:
    """Load the model, and find the best way to serve it; raises `KvdError`."""
    from kvd.worker.serving import seam  # noqa: PLC0415 - before any model module is imported

    seam.install()
    shortage.install_retries()
    modules.activate(progress)
    native = activation.activate(progress, command.ranks)
    mx.set_cache_limit(loading.freed_bytes(command))
    if not loading.has_separate_memory():  # else the grant is for the device's memory
        limit.start()
    path = model_files.resolve(command.source, progress)
    headers = model_files.inspect(path)
    mlx_modules.start(headers.config, alone=gang is None)
    progress("waiting for memory", 0.05)
    needed = loading.load_bytes(headers, command, packed=native.library is not None)
    loading.require_grant(ask_grant, needed, "weights and scratch")
    progress("weights", 0.1)
    record = _find_tokenizer(path, progress, ask_grant, needed)
    loaded = loading.limit_context(model_files.open_model(path, record), command.max_context)
    del record
    text = Text(
        loaded.tokenizer,
        vocab_size=loaded.vocab_size,
        context_length=loaded.context_length,
        limit_template=_limit_template,
        name=f"the model {command.source}",
    )
    compiler = Compiler(
        text.vocabulary,
        memory=ProcessMemory(limit.room, _held_outside_mlx, shortage.give_back, memory.trim_malloc),
    )
    with compiler.preparing(text.has_chat_template):
        if gang is not None:
            gang.begin(command, path, loaded.vocab_size, native=native.library is not None)
        plan = _plan(headers, command, loaded, native.library, gang)
        loaded = _read_weights(loaded, path, progress, plan, gang)
    weights_bytes = mx.get_active_memory()
    progress("checking attention", 0.8)
    serving = _serve(_probe(plan, headers, command, loaded), command, loaded, progress, gang)
    rules = find_rules(
        path,
        loaded.config,
        command.source,
        command.embeddings,
        splits_head=serving.runner.splits_head,
        appended=end_tokens(loaded.tokenizer._tokenizer),  # noqa: SLF001 - as `Text` does
    )
    return Model(
        loaded=serving.loaded,
        serving=serving,
        native=native.status or ("on" if loaded.own_products else None),
        weights_bytes=weights_bytes if serving.sums is None else serving.sums.active,
        text=text,
        fingerprint=None if command.segments_folder is None else fingerprint(headers),
        embedding_rules=rules,
        compiler=compiler,
    )


@dataclass(frozen=True, eq=False)
class _Plan:
    """What the checks of a load depend on, and the results of earlier ones."""

    library: ModuleType | None
    verdict: calibration.CalibrationResult | None
    bits: LayerBits
    settings: CacheSettings
    checks: Checks
    start: float = field(default_factory=time.monotonic)
    """When reading the weights began."""


def _plan(
    headers: model_files.Headers,
    command: LoadModel,
    loaded: model_files.LoadedModel,
    library: ModuleType | None,
    gang: Gang | None,
) -> _Plan:
    """Return the cache's settings and kept results; the weights need not be read."""
    verdict = calibration.find(headers)
    schemes = calibration.apply_floor(schemes_of(command.kv), verdict)
    layers = len(make_prompt_cache(loaded.model))
    bits = LayerBits(
        schemes,
        layers,
        headers,
        mode=command.bits_by_layer,
        calibrated=verdict,
        ranks=command.ranks,
    )
    settings = loading.settings_of(command, schemes, bits.choice.mixes)
    if gang is not None:  # its results depend on its other ranks
        return _Plan(library, verdict, bits, settings, Checks())
    checks = open_checks(headers, command, settings, verdict, library)
    return _Plan(library, verdict, bits, settings, checks)


def _probe(
    plan: _Plan,
    headers: model_files.Headers,
    command: LoadModel,
    loaded: model_files.LoadedModel,
) -> _Plan:
    """Probe the model's layers if that was never done; return the plan with what is known then."""
    if not plan.bits.unknown:
        return plan
    memory = loading.probe_bytes(headers, loaded, command, packed=plan.library is not None)
    seconds = bit_choice.LOAD_SHARE * (time.monotonic() - plan.start)
    plan.bits.probe(loaded, memory, seconds)
    settings = loading.settings_of(command, plan.settings.schemes, plan.bits.choice.mixes)
    if settings.mixes == plan.settings.mixes:
        return plan
    plan.checks.keep()
    checks = open_checks(headers, command, settings, plan.verdict, plan.library)
    return replace(plan, settings=settings, checks=checks)


def _read_weights(
    loaded: model_files.LoadedModel,
    path: Path,
    progress: ReportProgress,
    plan: _Plan,
    gang: Gang | None,
) -> model_files.LoadedModel:
    def reading(stage: str, fraction: float) -> None:
        progress(stage, 0.1 + 0.7 * fraction)

    if gang is None:
        return model_files.read_weights(loaded, path, reading, plan.library, plan.checks)
    return part.read_part(loaded, path, reading, plan.library, gang.peers, gang.group)


def _serve(
    plan: _Plan,
    command: LoadModel,
    loaded: model_files.LoadedModel,
    progress: ReportProgress,
    gang: Gang | None,
) -> Serving:
    """Choose how to serve the model; with a gang, together with its other ranks."""
    dtype = getattr(mx, dtype_name(loaded.model))
    direct_draws.prepare(loaded.vocab_size, dtype, plan.library, plan.checks)
    verdict, bits = plan.verdict, plan.bits.choice.info
    if gang is None:
        served = loading.serve(loaded, plan.settings, plan.library, progress, plan.checks)
        checks = _check_runner(served, plan.checks)
        rest = plan.bits.rest
        return Serving(loaded, served, served.runner, verdict, bits, checks, probing=rest)
    served = part.serve_part(plan.settings, loaded, plan.library, gang.peers)
    sums = part.measure(gang.peers, loaded, command, served.runner)
    loaded = replace(loaded, weights_bytes=sums.weights)
    return Serving(loaded, served, LeaderRunner(served.runner, gang), verdict, bits, Checks(), sums)


def _check_runner(served: probe.Served, checks: Checks) -> Checks:
    """Find out what the runner can do; return the checks of this way of serving."""
    checks = checks.under(served.name)
    served.runner.compile(checks)
    served.runner.pack(checks)
    served.runner.interleave(checks)
    served.runner.split_head(checks)
    if on_cuda():
        mlx_modules.finish()
        sampler.compile_modules()
        if isinstance(cache := served.runner.cache, ModelCache):
            layers = [layer for store in cache.stores for layer in store.layers]
            pool.compile_modules(array.dtype for layer in layers for array in layer.arrays())
    if (kept := modules.current()) is not None:
        kept.keep()
    return checks


def _find_tokenizer(
    path: Path, progress: ReportProgress, ask_grant: AskGrant, granted: int
) -> TokenizerRecord | None:
    """Return the tokenizer's record; None if transformers has to load the tokenizer.

    ``granted``: bytes of the load so far. Obtains a grant for transformers too if it is needed.
    """
    if lean_imports.has_transformers():
        return None
    record = tokenizer_cache.find(
        path, memory_bytes=limit.room(), tick=lambda: progress("tokenizer", 0.1)
    )
    if record is None:
        needed = granted + memory_bounds.TRANSFORMERS_BYTES
        loading.require_grant(ask_grant, needed, "weights, scratch and transformers")
    return record


def _held_outside_mlx() -> int:
    """Return the bytes that the process holds besides MLX's buffers."""
    buffers = 0
    if not loading.has_separate_memory():
        buffers = mx.get_active_memory() + mx.get_cache_memory()
    return memory.private() - buffers


def _limit_template(render: Callable[[], str]) -> str:
    with limit.narrow(TEMPLATE_BYTES):
        return limit_cpu(TEMPLATE_SECONDS, render)


def make_prefix_cache(command: LoadModel, cache: Any) -> PrefixCache:
    kv = command.kv
    cap_bytes = command.prefix_bytes if kv.prefix_cache is None else kv.prefix_cache
    if isinstance(cache, MlxLmCache) or not cap_bytes:
        return PrefixCache(None)
    tree = PrefixTree(cache.snapshots, command.prefill_chunk, kv.prefix_every, cap_bytes)
    return PrefixCache(tree, cache.costs.checkpoint_bytes, cache.costs.checkpoint_charge)


def make_admission(
    command: LoadModel, model: Model, prefix_cache: PrefixCache, ask_grant: AskGrant
) -> tuple[Admission, Costs | None]:
    """Measure what the process holds, and obtain the grant for the first pages."""
    runner = model.runner
    chunk, at_once = command.prefill_chunk, runner.pass_tokens(command.prefill_chunk)
    cache, kv_costs = runner.cache, runner.cache.costs
    # One prompt may take what rows that do not decode leave of the step's budget.
    most = at_once + command.max_rows if runner.packs else chunk
    page_bytes = kv_costs.unit_bytes
    if model.serving.sums is not None:
        measured = model.serving.sums.base
    else:
        measured = loading.base_bytes(model.loaded, command, model.serving.served.runner)
    # A load that skips checks has not yet allocated all that the process will hold.
    name = f"base of {command.max_rows} rows, chunks of {chunk}, {command.segments_folder}"
    base_bytes = max(measured, model.serving.checks.result(name, lambda: measured, int))
    model.serving.checks.keep()
    if model.serving.probing is not None:
        base_bytes += model.serving.probing.held_bytes
    row_bytes = cache.row_bytes + prefix_cache.reserved_bytes
    row_pages = -(-row_bytes // page_bytes)
    first_pages = SLAB_PAGES + FIRST_ROWS * row_pages
    grant = loading.require_grant(ask_grant, base_bytes + first_pages * page_bytes, "first pages")
    sizes = ReservationSizes(
        lambda end, level: -(-kv_costs.pages_bytes(end, most, level) // page_bytes),
        lambda start, end, level: (
            -(-kv_costs.continued_bytes(start, end, most, level) // page_bytes)
        ),
        cache.levels,
    )
    scheduler = Scheduler(
        max_rows=command.max_rows,
        chunk=chunk,
        sizes=sizes,
        budget=at_once + command.max_rows,
        decode_budget=runner.pass_tokens(chunk, alone=False) + command.max_rows,
        group=runner.packs,
    )
    budget = PageBudget(
        base_bytes, page_bytes, grant.total_bytes, grant.seq, limit_bytes=grant.limit_bytes
    )
    costs = costs_of(
        model.serving.served.runner.cache,
        weights=model.loaded.weights_bytes,
        base=base_bytes,
        row=row_bytes,
        first=first_pages,
        step=most,
        ranks=command.ranks,
    )
    return Admission(scheduler, budget, row_pages=row_pages, idle_pages=first_pages), costs
