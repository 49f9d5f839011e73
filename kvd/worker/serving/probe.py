"""Determines how a model can be served, at every load, before the first request.

First, a forward pass over mlx-lm's own caches shows what the model keeps: each layer's kind, heads
and sizes (`find_layout`). Then the ways to store and read it are tried, the best first, each with
the self-check. The first one that gives the model's own logits is used:

1. **pages**, several rows per pass: kvd's attention over opaque handles;
2. **dequantize-on-read**, several rows per pass, for the kinds that need it or for all: plain
   arrays and array masks, for models that work on keys and values themselves (MLA, soft caps,
   indexers);
3. the same two, **one row per pass**: for models that take a position as an int;
4. **dense**: mlx-lm's own caches. Always right, never quantized.

On an accelerator, kernels are tried first, and attend to pages if they are right and faster
(`kvd.worker.serving.kernel_check`).

The packings of all precision levels are checked. So are a dense start and a bounded size
(`max_kv_size`), both lowered so far that the check's short rows exceed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from msgspec.structs import replace as restruct

from kvd.worker.artifacts.checks import Checks
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.layout import (
    Access,
    AttentionPart,
    Entry,
    Layout,
    Part,
    StatePart,
    UnusedPart,
)
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product, page_product_by_copy
from kvd.worker.cache.scheme import LayerGeometry
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.store import KVStore
from kvd.worker.device import on_cpu
from kvd.worker.native.step import Library
from kvd.worker.serving import kernel_check, kernel_plan, selfcheck
from kvd.worker.serving.check_cases import (
    Case,
    error_of,
    error_of_kernels,
    kernel_cases,
    plain_cases,
    unquantized,
)
from kvd.worker.serving.rounding import batch_floor
from kvd.worker.serving.runner import Runner
from kvd.worker.serving.selfcheck import SelfCheckFailed
from protocol.errors import UnsupportedModel
from protocol.types import FastPath, FusedAttention

MEASURED_TOKENS = (8, 520)
"""Lengths at which the memory of mlx-lm's own caches is measured."""


@dataclass(frozen=True)
class Served:
    """How a model is served, and the results of the probe."""

    runner: Runner
    path: str
    """For example ``reference, gathered pages``."""
    error: float
    """Largest difference of a logit to the reference, relative to the largest logit."""
    reasons: Mapping[Kind, str]
    """Why a kind is not on pages, or why rows do not share a pass."""
    fused: FusedAttention | None = None
    """The verdict on kernels, if they were tried."""
    layers: FastPath | None = None
    """Whether decode steps run whole layers as blocks; None: not tried."""

    @property
    def name(self) -> str:
        """Identifies the way of serving among all ways to serve a model."""
        blocks = 0 if self.fused is None else self.fused.layers
        cache = self.runner.cache
        if not isinstance(cache, ModelCache):
            return self.path
        return f"{self.path}, {blocks} blocks: {_Way(cache.access, cache.batched)}"


class UnknownCacheError(Exception):
    """The model creates a cache that kvd has no store for."""


def find_layout(model: Any) -> Layout:
    """Find out what a model keeps, with forward passes of a few tokens over its own caches.

    Raises `UnknownCacheError` for caches of an unknown class, and `UnsupportedModel` if mlx-lm
    itself cannot run the model.
    """
    caches = make_prompt_cache(model)
    try:
        logits = [model(mx.array([ids]), cache=caches) for ids in (list(range(16)), [3])]
        finite = all(bool(mx.isfinite(one).all().item()) for one in logits)
    except (MemoryError, UnsupportedModel):
        raise
    except Exception as failed:  # models raise any type
        raise UnsupportedModel(
            f"mlx-lm cannot run this model here: {selfcheck.explain_failure(failed)}"
        ) from failed
    if not finite:
        raise UnsupportedModel(
            "the model's logits are not finite (NaN or infinite): its weights are damaged, or do "
            "not belong to this configuration"
        )
    entries = tuple(
        Entry(tuple(map(_part, leaves(cache))), composed=isinstance(cache, CacheList))
        for cache in caches
    )
    keys = [getattr(leaf, "keys", None) for cache in caches for leaf in leaves(cache)]
    dtypes = {array.dtype for array in keys if array is not None}
    if len(dtypes) > 1:
        raise UnknownCacheError(f"its keys have several dtypes: {sorted(map(str, dtypes))}")
    return Layout(entries, dtypes.pop() if dtypes else mx.float32)


def leaves(cache: Any) -> Sequence[Any]:
    """Return the caches that one of a model's caches is composed of."""
    return cache.caches if isinstance(cache, CacheList) else (cache,)


def _part(cache: Any) -> Part:
    if type(cache) is ArraysCache:
        arrays = cache.cache
        if any(array is None for array in arrays):
            if all(array is None for array in arrays):
                return UnusedPart()
            raise UnknownCacheError("it writes a recurrent state only in part")
        return StatePart(
            tuple(array.shape for array in arrays), tuple(array.dtype for array in arrays)
        )
    kind = kind_of(cache)
    if (keys := getattr(cache, "keys", None)) is None:
        return UnusedPart()
    return attention_part(kind, keys, cache.values)


def attention_part(kind: Kind, keys: mx.array, values: mx.array) -> AttentionPart:
    """Return what a layer keeps, from keys and values ``[1, heads, tokens, dim]``."""
    _, heads, _, k_dim = keys.shape
    # Some models store zeros as values and never read them: an indexer reads keys alone.
    used = values.size and bool(mx.any(values != 0).item())
    # Keep one channel: with empty arrays MLX divides by zero, and the process dies.
    v_dim = values.shape[-1] if used else 1
    return AttentionPart(kind, LayerGeometry(heads, k_dim, v_dim, keys.dtype.size))


def kind_of(cache: Any) -> Kind:
    """Return the attention kind of one of mlx-lm's caches; raises `UnknownCacheError`."""
    if type(cache) is KVCache:
        return FULL
    if type(cache) is RotatingKVCache:
        return Kind(cache.max_size, cache.keep)
    if type(cache) is ChunkedKVCache:
        return Kind(chunk=cache.chunk_size)
    raise UnknownCacheError(f"it has its own cache class, {type(cache).__name__}")


def serve(
    model: Any,
    settings: CacheSettings,
    vocab_size: int,
    library: ModuleType | None = None,
    kernels: FusedBackend | None = None,
    checks: Checks | None = None,
) -> Served:
    """Choose the best way to serve the model with right logits on this device; return its runner.

    ``library`` (`kvd.worker.native`) and ``kernels`` are tried if given. ``checks``: kept results,
    so that checks that passed before are not repeated. Raises `UnsupportedModel`
    if mlx-lm itself cannot run the model, if its logits are not finite, or if mlx-lm's own caches
    do not give the same logits twice.
    """
    try:
        layout = find_layout(model)
    except UnknownCacheError as unknown:
        return _own(model, vocab_size, str(unknown))
    reasons: dict[Kind, str] = {}
    alone = ""
    checks = checks or Checks()
    # Measured here, because each attempt has several runners.
    min_batch = checks.result("batch floor", partial(batch_floor, model), int) if on_cpu() else 1
    for way in _ways(layout):
        try:
            kept = checks.under(str(way))
            attempt = _Attempt(model, layout, settings, way, vocab_size, reasons, kept, min_batch)
            served = _try_way(attempt, library, kernels)
        except SelfCheckFailed as refused:
            for kind, access in way.access.items():
                if access is Access.PAGES:
                    reasons.setdefault(kind, str(refused))
            if way.batched:
                alone = str(refused)
        else:
            return served if way.batched else _with_reason(served, alone)
    return _own(model, vocab_size, next(iter(reasons.values()), "no way to read pages is correct"))


def _with_reason(served: Served, alone: str) -> Served:
    """Add why rows do not share a pass to the reasons that do not mention it."""
    reasons = {
        kind: why if alone in why else f"{why}; and rows do not share a pass, because {alone}"
        for kind, why in served.reasons.items()
    }
    return replace(served, reasons=reasons)


@dataclass(frozen=True)
class _Way:
    access: Mapping[Kind, Access]
    batched: bool

    def __str__(self) -> str:
        access = ", ".join(f"{kind}: {how.name}" for kind, how in self.access.items())
        return f"{access}; {'several rows' if self.batched else 'one row'}"


def _ways(layout: Layout) -> Iterator[_Way]:
    kinds = layout.kinds
    pages = dict.fromkeys(kinds, Access.PAGES)
    for batched in (True, False):
        yield _Way(pages, batched)
        if len(kinds) > 1:
            for kind in kinds:
                yield _Way(pages | {kind: Access.RECTANGLES}, batched)
        if kinds:
            yield _Way(dict.fromkeys(kinds, Access.RECTANGLES), batched)


@dataclass(frozen=True, eq=False)
class _Attempt:
    """One way to serve a model, with everything that its checks need."""

    model: Any
    layout: Layout
    settings: CacheSettings
    way: _Way
    vocab_size: int
    reasons: Mapping[Kind, str]
    """Why kinds are not on pages, as far as other ways have shown."""
    kept: Checks
    min_batch: int

    def runner(self, settings: CacheSettings) -> Runner:
        way = self.way
        cache = ModelCache(self.layout, settings, access=way.access, batched=way.batched)
        return Runner(self.model, cache, self.min_batch)

    @cached_property
    def served(self) -> Runner:
        return self.runner(self.settings)

    @property
    def paged(self) -> list[KVStore]:
        """The stores that are served over pages."""
        cache = self.served.cache
        pairs = zip(cache.stores, cache.access.values(), strict=True)
        return [store for store, access in pairs if access is Access.PAGES]

    @cached_property
    def lengths(self) -> Sequence[int]:
        return selfcheck.lengths_for(self.layout.kinds)

    @cached_property
    def cases(self) -> list[Case]:
        return plain_cases(self.served.cache, self.lengths)

    def found(self, path: str, error: float) -> Served:
        """Return that this way is right; the cache has the backend already."""
        way = self.way
        remaining = {
            kind: why
            for kind, why in self.reasons.items()
            if way.access[kind] is not Access.PAGES or not way.batched
        }
        return Served(self.served, path, error, remaining)

    def against_own_caches(self, backend: Backend | None) -> float:
        """Compare with mlx-lm's own caches, without quantization."""
        runner = self.runner(unquantized(self.settings))
        if backend is not None:
            runner.cache.use(page_product, backend)
        return selfcheck.against_own_caches(runner, self.vocab_size, self.lengths)

    def plain(self, library: ModuleType | None) -> Served:
        """Check attention without kernels; the cache uses the fastest way that is right."""
        self.kept.result("own caches", partial(self.against_own_caches, None), float)
        native = Library(library) if library and self.layout.dtype == mx.float32 else None
        failed = []
        for path, product, attend in _attention_paths(native, paged=bool(self.paged)):
            check = partial(error_of, self.runner, product, attend, self.vocab_size)
            try:
                errors = [
                    self.kept.result(f"{path}, {number}", partial(check, *case), float)
                    for number, case in enumerate(self.cases)
                ]
            except SelfCheckFailed as refused:
                failed.append(f"{path}: {refused}" if self.paged else str(refused))
                continue
            self.served.cache.use(product, attend)
            return self.found(path if self.layout.kinds else "recurrent states", max(errors))
        raise SelfCheckFailed("; ".join(failed))

    def check_kernels(self, backend: Backend) -> float:
        """Check kernels in every way that they may be used; return the error."""
        own = self.against_own_caches(backend)
        cases = kernel_cases(self.cases)
        return max(own, error_of_kernels(self.runner, self.vocab_size, cases, backend))

    def compile_kernels(self, kernels: FusedBackend) -> None:
        limits = [limits for limits, _ in kernel_cases(self.cases)]
        limits.append(unquantized(self.settings))
        kernel_plan.compile_ahead(self.runner, page_product, kernels, limits)


def _try_way(attempt: _Attempt, library: ModuleType | None, kernels: FusedBackend | None) -> Served:
    """Check one way: without quantization against mlx-lm's own caches, then with quantization.

    Plain operations are checked only if kernels cannot do without them: on CUDA, MLX compiles them
    when they first run, which takes longer than the rest of a load.
    """
    plain = cache(partial(attempt.plain, library))
    if kernels is None or not attempt.paged:
        return plain()
    ran = False

    def run() -> tuple[FusedAttention, float]:
        nonlocal ran
        ran = True
        with attempt.kept.alone():
            attempt.compile_kernels(kernels)
            timed = plain if attempt.kept.times_plain else None
            return kernel_check.check_kernels(kernels, attempt.paged, attempt.check_kernels, timed)

    kind = tuple[FusedAttention, float]
    verdict, error = attempt.kept.result("kernels", run, kind, passed=lambda found: found[0].used)
    if not ran:
        verdict = restruct(verdict, compile_s=0.0)
    if not verdict.used:
        return replace(plain(), fused=verdict)
    product = page_product
    if not all(kernels.can_read(store.layers, store.pages.levels) for store in attempt.paged):
        error = max(error, plain().error)  # steps that kernels cannot run use plain operations
        product = attempt.paged[0].page_product
    attempt.served.cache.use(product, kernels)
    kernels.kernels.launches = 0  # do not count the launches of the check
    return replace(attempt.found("fused", error), fused=verdict)


NATIVE = "native"
"""`Served.path` if the native library attends."""

_Attention = tuple[str, Callable[..., mx.array], Backend | None]
"""A name, the product over pages, and the backend that attends instead, if any."""


def _attention_paths(native: Library | None, *, paged: bool) -> list[_Attention]:
    """Return the ways to attend, the fastest first."""
    if not paged:
        return [("dequantize on read", page_product, None)]
    plain: list[_Attention] = [
        ("reference, gathered pages", page_product, None),
        ("reference, copied pages", page_product_by_copy, None),
    ]
    return plain if native is None else [(NATIVE, page_product, native), *plain]


def _own(model: Any, vocab_size: int, why: str) -> Served:
    make_caches = partial(make_prompt_cache, model)
    try:
        fixed, per_token = _measured_cost(model, make_caches)
        runner = Runner(model, MlxLmCache(make_caches, fixed_bytes=fixed, token_bytes=per_token))
        error = selfcheck.against_own_caches(runner, vocab_size)
    except SelfCheckFailed as refused:
        raise UnsupportedModel(
            f"even mlx-lm's own caches do not serve this model correctly: {refused}"
        ) from refused
    return Served(runner, "dense, mlx-lm's own caches", error, {FULL: why})


def _measured_cost(model: Any, make_caches: Callable[[], list[Any]]) -> tuple[int, int]:
    """Return the bytes of the shortest sequence, and the bytes per further token."""
    sizes = []
    for length in MEASURED_TOKENS:
        probe = MlxLmCache(make_caches, fixed_bytes=0, token_bytes=0)
        row = probe.new_row()
        try:
            model(mx.array([[0] * length]), cache=row.caches)
            mx.eval(probe.arrays())
        except MemoryError:
            raise
        except Exception as failed:  # models raise any type
            raise SelfCheckFailed(selfcheck.explain_failure(failed)) from failed
        sizes.append(probe.nbytes)
    short, long = sizes
    return short, -(-max(0, long - short) // (MEASURED_TOKENS[1] - MEASURED_TOKENS[0]))
