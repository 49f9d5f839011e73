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

On an accelerator, kernels then attend to pages if they are right too, and faster
(`kvd.worker.serving.kernel_check`).

The packings of all precision levels are checked. So are a dense start and a bounded size
(`max_kv_size`), both lowered so far that the check's short rows exceed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Packing, Scheme
from kvd.worker.cache.settings import CacheSettings, no_floors
from kvd.worker.native.step import Library
from kvd.worker.serving import kernel_check, kernel_plan, selfcheck
from kvd.worker.serving.runner import Runner
from kvd.worker.serving.selfcheck import SelfCheckFailed
from protocol.errors import UnsupportedModel
from protocol.types import FastPath, FusedAttention

MEASURED_TOKENS = (8, 520)
"""Lengths at which the memory of mlx-lm's own caches is measured."""
CHECKED_START = 128
"""Length at which rows of the check leave the dense start: one before the steps, one in them."""
PAGELESS = (2, 40)
"""Lengths of rows that are too short for a page."""
CHECKED_WINDOW = 96
"""Tokens that rows of a bounded size see in the check, besides the kept first ones."""


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


_Case = tuple[CacheSettings, Sequence[int]]
"""Settings to check, and the lengths of the rows."""


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
        Entry(tuple(map(_part, _leaves(cache))), composed=isinstance(cache, CacheList))
        for cache in caches
    )
    keys = [getattr(leaf, "keys", None) for cache in caches for leaf in _leaves(cache)]
    dtypes = {array.dtype for array in keys if array is not None}
    if len(dtypes) > 1:
        raise UnknownCacheError(f"its keys have several dtypes: {sorted(map(str, dtypes))}")
    return Layout(entries, dtypes.pop() if dtypes else mx.float32)


def _leaves(cache: Any) -> Sequence[Any]:
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
    kind = _kind(cache)
    if (keys := getattr(cache, "keys", None)) is None:
        return UnusedPart()
    _, heads, _, k_dim = keys.shape
    values = cache.values
    # Some models store zeros as values and never read them: an indexer reads keys alone.
    used = values.size and bool(mx.any(values != 0).item())
    # Keep one channel: with empty arrays MLX divides by zero, and the process dies.
    v_dim = values.shape[-1] if used else 1
    return AttentionPart(kind, LayerGeometry(heads, k_dim, v_dim, keys.dtype.size))


def _kind(cache: Any) -> Kind:
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
    for way in _ways(layout):
        try:
            served = _try_way(
                model, layout, settings, way, vocab_size, reasons, library, kernels,
                (checks or Checks()).under(str(way)),
            )  # fmt: skip
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


def _try_way(
    model: Any,
    layout: Layout,
    settings: CacheSettings,
    way: _Way,
    vocab_size: int,
    reasons: dict[Kind, str],
    library: ModuleType | None,
    kernels: FusedBackend | None,
    kept: Checks,
) -> Served:
    """Check one way: without quantization against mlx-lm's own caches, then with quantization."""

    def runner(schemes: CacheSettings) -> Runner:
        return Runner(model, ModelCache(layout, schemes, access=way.access, batched=way.batched))

    # Without `max_size`, which mlx-lm's caches do not have.
    dense = replace(
        settings,
        schemes=(Scheme(16, 16),),
        mixes=(),
        floors=no_floors,
        quantized_start=0,
        max_size=None,
    )
    lengths = selfcheck.lengths_for(layout.kinds)
    own = partial(selfcheck.against_own_caches, runner(dense), vocab_size, lengths)
    kept.result("own caches", own, float)
    served = runner(settings)
    checks: list[_Case] = [(_check_settings(settings), lengths)]
    checks += [(lower, selfcheck.SHORT_LENGTHS) for lower in _lower_levels(served.cache)]
    paged = any(access is Access.PAGES for access in way.access.values())
    native = Library(library) if library and layout.dtype == mx.float32 else None
    failed = []
    for path, product, attend in _attention_paths(native, paged=paged):
        served.cache.use(product, attend)
        check = partial(_error, runner, product, attend, vocab_size)
        try:
            errors = [
                kept.result(f"{path}, {number}", partial(check, limits, rows), float)
                for number, (limits, rows) in enumerate(checks)
            ]
        except SelfCheckFailed as refused:
            failed.append(f"{path}: {refused}" if paged else str(refused))
            continue
        if not layout.kinds:
            path = "recurrent states"  # noqa: PLW2901 - the model has no attention
        remaining = {
            kind: why
            for kind, why in reasons.items()
            if way.access[kind] is not Access.PAGES or not way.batched
        }
        found = Served(served, path, max(errors), remaining)
        if kernels is None or not paged:
            return found
        checked = partial(_check_kernels, runner, product, vocab_size, _kernel_cases(checks))
        limits = [limits for limits, _ in _kernel_cases(checks)]
        plan = partial(kernel_plan.compile_ahead, runner, product, kernels, limits)
        return _with_kernels(found, kernels, plan, checked, kept)
    raise SelfCheckFailed("; ".join(failed))


def _with_kernels(
    found: Served,
    kernels: FusedBackend,
    plan: Callable[[], None],
    check: kernel_check.Check,
    kept: Checks,
) -> Served:
    """Let kernels attend if they are right and faster; what they cannot run stays as it was."""
    cache = found.runner.cache
    paged = [
        store
        for store, access in zip(cache.stores, cache.access.values(), strict=True)
        if access is Access.PAGES
    ]

    ran = False

    def run() -> tuple[FusedAttention, float]:
        nonlocal ran
        ran = True
        plan()
        return kernel_check.check_kernels(kernels, paged, check)

    kind = tuple[FusedAttention, float]
    verdict, error = kept.result("kernels", run, kind, passed=lambda found: found[0].used)
    if not ran:
        verdict = restruct(verdict, compile_s=0.0)
    if not verdict.used:
        return replace(found, fused=verdict)
    cache.use(paged[0].page_product, kernels)
    kernels.kernels.launches = 0  # do not count the launches of the check
    error = max(error, found.error)
    return replace(found, path="fused", error=error, fused=verdict)


def _kernel_cases(checks: Sequence[_Case]) -> list[_Case]:
    """Return the checks of plain operations, and further ones that only kernels need.

    These are rows without a page, and each level alone.
    """
    settings = checks[0][0]
    seen = {(limits.schemes, limits.mixes) for limits, _ in checks}
    others = (settings.only(level) for level in range(1, len(settings.schemes)))
    lower = [
        (one, selfcheck.SHORT_LENGTHS) for one in others if (one.schemes, one.mixes) not in seen
    ]
    return [*checks, (settings, PAGELESS), *lower]


def _check_kernels(
    runner: Callable[[CacheSettings], Runner],
    product: Callable[..., mx.array],
    vocab_size: int,
    cases: Sequence[_Case],
    kernels: Backend,
) -> float:
    """Check kernels on these cases, and on rows with pages on several levels."""
    settings = cases[0][0]
    errors = [
        _error(runner, product, kernels, vocab_size, limits, lengths) for limits, lengths in cases
    ]
    if len(settings.store_schemes) > 1:
        mixed = runner(settings)
        mixed.cache.use(product, kernels)
        # A page on each level, and 64 to 127 exact tokens after them.
        lengths = (2, PAGE_TOKENS * (len(settings.store_schemes) + 1) + 6)
        errors.append(selfcheck.against_dequantized(mixed, vocab_size, lengths, mixed=True))
    return max(errors)


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


def _error(
    make_runner: Callable[[CacheSettings], Runner],
    product: Callable[..., mx.array],
    backend: Backend | None,
    vocab_size: int,
    limits: CacheSettings,
    lengths: Sequence[int],
) -> float:
    runner = make_runner(limits)
    runner.cache.use(product, backend)
    return selfcheck.against_dequantized(runner, vocab_size, lengths)


def _check_settings(settings: CacheSettings) -> CacheSettings:
    """Return settings with the dense start and the bound lowered: rows of a check exceed both."""
    keep = min(settings.keep, PAGE_TOKENS)
    return replace(
        settings,
        quantized_start=min(settings.quantized_start, CHECKED_START),
        max_size=settings.max_size and min(settings.max_size, keep + CHECKED_WINDOW),
        keep=keep,
    )


def _lower_levels(cache: ModelCache) -> list[CacheSettings]:
    """Return settings that start at lower levels: as few as are needed to check all packings.

    Searches from the lowest level up, because levels between two others often have no packing of
    their own.
    """
    settings = cache.settings
    seen = _packings(cache, 0)
    found = []
    for level in reversed(range(1, cache.levels)):
        packings = _packings(cache, level)
        if not packings <= seen:
            seen |= packings
            found.append(replace(settings.only(level), quantized_start=0))
    return found


def _packings(cache: ModelCache, level: int) -> set[tuple[bool, int, Packing]]:
    """Return the products of a precision level, as (is of keys, head size, packing)."""
    settings = cache.settings
    schemes = settings.layer_schemes(len(cache.layout.entries))
    place = settings.store_level(level) if level else len(settings.store_schemes) - cache.levels
    found: set[tuple[bool, int, Packing]] = set()
    for entry, part in cache.layout.attention():
        scheme, geometry = schemes[entry][place], part.geometry
        found.add((True, geometry.k_dim, geometry.keys(scheme)))
        found.add((False, geometry.v_dim, geometry.values(scheme)))
    return {one for one in found if one[2].bits < 16}


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
