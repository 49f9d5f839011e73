"""Copies of rows: to another store, to files, to mlx-lm's own caches, and back.

Only this module copies keys and values of drop-in caches. Pages are copied without change if both
sides store them alike; otherwise each function documents what is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.packed import Packed
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.mlx_lm_drop_in.shared_store import LayerRows, SharedRow, SharedStore
from protocol.pages import TAIL_TOKENS

FORMAT = 2
"""Format of saved states. It increases when an older reader would misread a newer file."""

CONVERTIBLE = (KVCache, RotatingKVCache, QuantizedKVCache)
"""mlx-lm's caches that hold tokens in order and without padding."""


# Rows as images: copies without a store.


@dataclass(frozen=True)
class RowImage:
    """One row: its integers, and the indices of its pages in the image."""

    length: int
    level: int
    skipped: int
    trimmed: bool
    pages: list[tuple[int, int]]
    """Level of each page, and its index among the image's pages of that level."""


@dataclass(frozen=True)
class Image:
    """Copies of some rows of a store. Pages that rows share are copied once."""

    geometry: LayerGeometry
    dtype: mx.Dtype
    schemes: tuple[Scheme, ...]
    rows: list[RowImage | None]
    """None for an empty sequence."""
    pages: dict[int, tuple[Packed, Packed]]
    """Packed keys and values by level."""
    tails: tuple[mx.array, mx.array]
    """Keys and values, ``[rows that are not None, heads, tokens of the longest tail, dim]``."""


def image_of(shared: SharedStore, rows: Sequence[SharedRow]) -> Image:
    """Copy rows, of which at least one is not empty; lazy. Call it inside `SharedStore.at_work`."""
    own = [one.row for one in rows if one.row is not None]
    store = shared.rows
    layer = store.layers[0]
    places: dict[PageId, int] = {}
    by_level: dict[int, list[int]] = {}
    for page in dict.fromkeys(page for row in own for page in row.pages):
        slots = by_level.setdefault(page.level, [])
        places[page] = len(slots)
        slots.append(page.slot)
    longest = max(1, *(row.tail_length for row in own))  # files cannot hold empty arrays
    tails = mx.array([row.slot for row in own])
    return Image(
        layer.geometry,
        store.dtype,
        store.schemes,
        [None if one.row is None else _row_image(one.row, places) for one in rows],
        {level: layer.pools[level].copy(mx.array(slots)) for level, slots in by_level.items()},
        (layer.tail_keys[tails, :, :longest], layer.tail_values[tails, :, :longest]),
    )


def _row_image(row: Row, places: dict[PageId, int]) -> RowImage:
    pages = [(page.level, places[page]) for page in row.pages]
    return RowImage(row.length, row.level, row.skipped, row.trimmed, pages)


def put(shared: SharedStore, image: Image) -> list[SharedRow]:
    """Add an image's rows to a store, all or none. Call it inside `SharedStore.at_work`.

    Pages of a scheme that the store lacks are quantized again, to its last scheme. The returned
    rows have no reference yet.
    """
    store = shared.prepared(image.geometry, image.dtype)
    shared.drain()
    own, last = store.schemes, len(store.schemes) - 1
    levels = [own.index(scheme) if scheme in own else last for scheme in image.schemes]
    taken: dict[int, list[PageId]] = {}
    rows = [SharedRow() for _ in image.rows]
    tail = 0
    try:
        for level in sorted(image.pages):
            taken[level] = _put_pages(store, levels[level], image, level)
        for new, one in zip(rows, image.rows, strict=True):
            if one is not None:
                row = new.row = store.new_row()
                row.length, row.level, row.skipped = one.length, levels[one.level], one.skipped
                row.trimmed = one.trimmed
                pages = [taken[level][place] for level, place in one.pages]
                store.pages.retain(pages)
                row.pages = pages
                sides = (side[tail, :, : row.tail_length] for side in image.tails)
                store.layers[0].fill_tail(row.slot, *sides)
                tail += 1
        store.tables.invalidate()
    except BaseException:
        for new in rows:
            if new.row is not None:
                store.free(new.row, clean=False)
        raise
    finally:
        store.pages.release([page for pages in taken.values() for page in pages])
    return rows


def _put_pages(store: LayerRows, target: int, image: Image, level: int) -> list[PageId]:
    keys, values = image.pages[level]
    old = PagePool(image.geometry, image.schemes[level], image.dtype)
    new = store.layers[0].pools[target]
    if (old.key_packing, old.value_packing) != (new.key_packing, new.value_packing):
        packed_keys, packed_values = new.pack(*old.unpack(keys, values))
        keys = keys if old.key_packing == new.key_packing else packed_keys
        values = values if old.value_packing == new.value_packing else packed_values
    pages = store.pages.take(target, keys[0].shape[0])
    try:
        store.layers[0].write(target, [page.slot for page in pages], keys, values)
    except BaseException:
        store.pages.release(pages)
        raise
    return pages


# Between stores.


@contextmanager
def together(
    *parts: tuple[SharedStore, Sequence[SharedRow]],
) -> Iterator[tuple[SharedStore, list[SharedRow]]]:
    """Bring rows of several stores into one of these stores until the context ends.

    That is a model's own store (`SharedStore.home`) if there is one, else the first. To keep the
    rows, the caller adds references of its own. Rows of the other stores are copied; if one copy
    fails, none of the copies stays. Raises ``ValueError`` if the stores attend to different
    tokens.
    """
    kinds = {store.kind for store, _ in parts}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.name for kind in kinds))
        raise ValueError(f"caches with different attention do not merge: {names}")
    shared = next((store for store, _ in parts if store.home), parts[0][0])
    rows: list[SharedRow] = []
    try:
        for store, own in parts:
            rows += _rows_on(shared, store, own)
        yield shared, rows
    finally:
        shared.drop(rows)


def _rows_on(
    target: SharedStore, source: SharedStore, rows: Sequence[SharedRow]
) -> list[SharedRow]:
    """Return these rows, or copies of them, on the target store, with a reference added."""
    image = None
    if target is not source and any(one.row is not None for one in rows):
        with source.at_work():
            image = image_of(source, rows)
    with target.at_work():
        if target is source:
            return target.hold(rows)
        return target.hold([SharedRow() for _ in rows] if image is None else put(target, image))


# Files.


class State(dict[str, Any]):
    """A cache's state: `mx.eval` sees the lazy arrays, and `items` returns the full content.

    mlx-lm evaluates ``cache.state`` after each chunk of a prompt. A copy of all pages would double
    the memory. `mx.eval` reads the dict's own entries in C, while `mlx.utils.tree_flatten`, which
    saves the state, calls `items`.
    """

    def __init__(self, shared: SharedStore, rows: Sequence[SharedRow], *, batched: bool) -> None:
        with shared.at_work():
            super().__init__(lazy=shared.lazy_arrays())
        self._shared = shared
        self._rows = list(rows)
        self._batched = batched

    def items(self) -> Any:
        """Return the saved form: a JSON header, packed pages by level, and tails."""
        header: dict[str, Any] = {
            "format": FORMAT,
            "schemes": [scheme.name for scheme in self._shared.schemes],
            "kind": [self._shared.kind.window, self._shared.kind.keep, self._shared.kind.chunk],
            "quantized_start": self._shared.quantized_start,
            "batched": self._batched,
            "rows": [None] * len(self._rows),
        }
        arrays: dict[str, Any] = {}
        with self._shared.at_work():
            if any(one.row is not None for one in self._rows):
                image = image_of(self._shared, self._rows)
                g = image.geometry
                header["geometry"] = [g.kv_heads, g.k_dim, g.v_dim, g.itemsize]
                header["dtype"] = str(image.dtype).removeprefix("mlx.core.")
                header["rows"] = [None if row is None else vars(row) for row in image.rows]
                for level, (keys, values) in image.pages.items():
                    arrays[f"keys{level}"] = list(keys)
                    arrays[f"values{level}"] = list(values)
                arrays["tails"] = list(image.tails)
        return {"header": json.dumps(header), **arrays}.items()


def restored(state: Any) -> tuple[SharedStore, list[SharedRow], bool]:
    """Make a new store from a state. Returns it, its rows, and whether they were a batch."""
    parts = dict(state.items()) if isinstance(state, Mapping) else {}
    found = _header(parts).get("format")
    if found != FORMAT:
        raise ValueError(
            f"expected the state of a quantized cache in format {FORMAT}, got"
            f" {found or type(state).__name__}"
        )
    try:
        shared, image, batched = _read(parts, _header(parts))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as wrong:
        raise ValueError(
            "the state of a quantized cache is damaged; make the cache again from its prompt"
            f" ({type(wrong).__name__}: {wrong})"
        ) from wrong
    if isinstance(image, int):
        return shared, [SharedRow() for _ in range(image)], batched
    with shared.at_work():
        return shared, put(shared, image), batched


def _header(parts: dict[str, Any]) -> dict[str, Any]:
    try:
        header = json.loads(parts.get("header", "{}"))
    except (TypeError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def _read(parts: dict[str, Any], header: dict[str, Any]) -> tuple[SharedStore, Image | int, bool]:
    """Return a state's empty store and its rows, or the number of its rows if all are empty."""
    window, keep, chunk = header["kind"]
    schemes = tuple(Scheme.parse(name) for name in header["schemes"])
    start, batched = int(header["quantized_start"]), bool(header["batched"])
    if len(schemes) < (2 if start else 1):
        raise ValueError("a scheme is missing")
    shared = SharedStore(schemes, Kind(window, keep, chunk), quantized_start=start)
    if "tails" not in parts:
        if any(row is not None for row in header["rows"]):
            raise ValueError("tails are missing")
        return shared, len(header["rows"]), batched
    dtype = getattr(mx, header["dtype"])
    if not isinstance(dtype, mx.Dtype):
        raise TypeError(f"{dtype} is not a dtype")
    image = Image(
        LayerGeometry(*header["geometry"]),
        dtype,
        schemes,
        [_read_row(row) for row in header["rows"]],
        {
            level: (tuple(parts[f"keys{level}"]), tuple(parts[f"values{level}"]))
            for level in range(len(schemes))
            if f"keys{level}" in parts
        },
        tuple(parts["tails"]),
    )
    _check_image(image)
    return shared, image, batched


def _read_row(row: dict[str, Any] | None) -> RowImage | None:
    if row is None:
        return None
    return RowImage(**(row | {"pages": [(int(level), int(at)) for level, at in row["pages"]]}))


def _check_image(image: Image) -> None:
    """Raise ``ValueError`` if an image's arrays do not match its integers."""
    counts = {}
    for level, sides in image.pages.items():
        pool = PagePool(image.geometry, image.schemes[level], image.dtype)
        pages = counts[level] = sides[0][0].shape[0]
        wanted = [(pages, *like.shape[1:], like.dtype) for like in pool.arrays()]
        if [(*array.shape, array.dtype) for side in sides for array in side] != wanted:
            raise ValueError(f"pages of {image.schemes[level].name} have wrong shapes")
    own = [row for row in image.rows if row is not None]
    g, tokens = image.geometry, image.tails[0].shape[2]
    for tails, dim in zip(image.tails, (g.k_dim, g.v_dim), strict=True):
        if tails.shape != (len(own), g.kv_heads, tokens, dim) or tails.dtype != image.dtype:
            raise ValueError("tails have wrong shapes")
    for row in own:
        tail = row.length - PAGE_TOKENS * (len(row.pages) + row.skipped)
        if not (0 <= tail <= tokens <= TAIL_TOKENS and row.skipped >= 0):
            raise ValueError("a row's pages and tail do not match its length")
        if row.level not in range(len(image.schemes)):
            raise ValueError(f"a row is on level {row.level}")
        if not all(0 <= place < counts.get(level, 0) for level, place in row.pages):
            raise ValueError("a row has missing pages")


# mlx-lm's own caches.


def dense_parts(cache: Any) -> tuple[mx.array, mx.array] | None:
    """Return keys and values of mlx-lm's `KVCache`, `RotatingKVCache` or `QuantizedKVCache`.

    The arrays are ``[batch, heads, tokens, dim]``, in the order of positions; None if the cache is
    empty. Raises ``TypeError`` for other caches, and ``ValueError`` if a rotating cache has
    overwritten tokens, because the positions of the rest are then unknown.
    """
    if type(cache) not in CONVERTIBLE:
        names = ", ".join(one.__name__ for one in CONVERTIBLE)
        raise TypeError(
            f"cannot convert a {type(cache).__name__}, only {names}; extract() the sequences of a"
            " batch, convert each and merge() them"
        )
    if cache.empty():
        return None
    if isinstance(cache, RotatingKVCache) and cache.offset > cache.max_size:
        raise ValueError(
            f"{cache.offset} tokens were written to a rotating cache of {cache.max_size}: it can"
            " only be converted before it overwrites tokens"
        )
    keys, values = cache.keys_and_values()
    if isinstance(cache, QuantizedKVCache):
        keys, values = (
            mx.dequantize(words, scales, biases, group_size=cache.group_size, bits=cache.bits)
            for words, scales, biases in (keys, values)
        )
    return keys[..., : cache.offset, :], values[..., : cache.offset, :]


def kv_cache_of(shared: SharedStore, row: Row | None) -> Any:
    """Return mlx-lm's `KVCache` or `RotatingKVCache` with a row's tokens, dequantized."""
    kind = shared.kind
    bounded = kind.window is not None
    cache = RotatingKVCache(kind.window, kind.keep) if bounded else KVCache()
    if row is None:
        return cache
    with shared.at_work():
        keys, values = shared.rows.read(row, 0)
        positions = shared.rows.positions(row)
    if bounded:
        oldest = row.length - (cache.max_size - kind.keep)
        seen = [i for i, at in enumerate(positions) if at >= oldest or at < kind.keep]
        keys, values = keys[:, mx.array(seen)], values[:, mx.array(seen)]
        cache._idx = len(seen)  # noqa: SLF001 - only `state` sets it otherwise
    cache.keys, cache.values = mx.contiguous(keys[None]), mx.contiguous(values[None])
    cache.offset = row.length
    return cache
