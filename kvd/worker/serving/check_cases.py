"""What the probe checks attention on: settings of the cache, and lengths of rows.

The packings of all precision levels are checked. So are a dense start and a bounded size, both
lowered so far that the check's short rows exceed them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from kvd.worker.cache.backend import Backend
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.scheme import PAGE_TOKENS, Packing, Scheme
from kvd.worker.cache.settings import CacheSettings, no_floors
from kvd.worker.serving import selfcheck
from kvd.worker.serving.runner import Runner

CHECKED_START = 128
"""Length at which rows of the check leave the dense start: one before the steps, one in them."""
PAGELESS = (2, 40)
"""Lengths of rows that are too short for a page."""
CHECKED_WINDOW = 96
"""Tokens that rows of a bounded size see in the check, besides the kept first ones."""

Case = tuple[CacheSettings, Sequence[int]]
"""Settings to check, and the lengths of the rows."""
MakeRunner = Callable[[CacheSettings], Runner]


def unquantized(settings: CacheSettings) -> CacheSettings:
    """Return settings for the comparison with mlx-lm's caches, which have no bounded size."""
    return replace(
        settings,
        schemes=(Scheme(16, 16),),
        mixes=(),
        floors=no_floors,
        quantized_start=0,
        max_size=None,
    )


def plain_cases(cache: ModelCache, lengths: Sequence[int]) -> list[Case]:
    """Return the checks of plain operations for a cache; ``lengths``: those of the first check."""
    lower = [(limits, selfcheck.SHORT_LENGTHS) for limits in _lower_levels(cache)]
    return [(_checked_settings(cache.settings), lengths), *lower]


def kernel_cases(checks: Sequence[Case]) -> list[Case]:
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


def error_of_kernels(
    make_runner: MakeRunner, vocab_size: int, cases: Sequence[Case], kernels: Backend
) -> float:
    """Check kernels on these cases, and on rows with pages on several levels."""
    settings = cases[0][0]
    errors = [error_of(make_runner, page_product, kernels, vocab_size, *case) for case in cases]
    if len(settings.store_schemes) > 1:
        mixed = make_runner(settings)
        mixed.cache.use(page_product, kernels)
        # A page on each level, and 64 to 127 exact tokens after them.
        lengths = (2, PAGE_TOKENS * (len(settings.store_schemes) + 1) + 6)
        errors.append(selfcheck.against_dequantized(mixed, vocab_size, lengths, mixed=True))
    return max(errors)


def error_of(
    make_runner: MakeRunner,
    product: Callable[..., mx.array],
    backend: Backend | None,
    vocab_size: int,
    limits: CacheSettings,
    lengths: Sequence[int],
) -> float:
    """Compare attention with dense copies of the rows; return the error.

    Raises `SelfCheckFailed`.
    """
    runner = make_runner(limits)
    runner.cache.use(product, backend)
    return selfcheck.against_dequantized(runner, vocab_size, lengths)


def _checked_settings(settings: CacheSettings) -> CacheSettings:
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
