"""Rows that leave their store: for another store, for a file, for mlx-lm's own caches, and back.

The one place where keys and values of drop-in caches are copied. Pages go as they are where both
sides store them alike; each function says what is lost elsewhere.
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
from kvd.worker.cache.rows import TAIL_TOKENS, Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.mlx_lm_drop_in.shared_store import LayerRows, SharedRow, SharedStore

FORMAT = 1
"""Of saved states; counted up when an older reader would misread a newer file."""

CONVERTIBLE = (KVCache, RotatingKVCache, QuantizedKVCache)
"""Those of mlx-lm's caches that hold tokens in order and without padding."""


def held_bytes(shared: SharedStore, rows: Sequence[SharedRow]) -> int:
    """Return the bytes of these rows' pages, each counted once, and of their tails."""
    with shared.at_work():
        mine = {one.row for one in rows if one.row is not None}
        if not mine:
            return 0
        store = shared.rows
        pages = {page for row in mine for page in row.held}
        return (
            sum(store.pages.page_bytes(page.level) for page in pages)
            + len(mine) * store.tails.row_bytes
        )


# Rows as values.


@dataclass(frozen=True)
class RowImage:
    """One row: its integers, and where its pages and its tail are in the image."""

    length: int
    level: int
    skipped: int
    trimmed: bool
    pages: list[tuple[int, int]]
    """Level, and place among the image's pages of that level."""


@dataclass(frozen=True)
class Image:
    """Copies of some rows of a store. Pages that rows share are there once."""

    geometry: LayerGeometry
    dtype: mx.Dtype
    schemes: tuple[Scheme, ...]
    rows: list[RowImage | None]
    """None is an empty sequence."""
    pages: dict[int, tuple[Packed, Packed]]
    """By level: packed keys and values."""
    tails: tuple[mx.array, mx.array]
    """Keys and values, ``[rows that are not None, heads, tokens of the longest tail, dim]``."""


def image_of(shared: SharedStore, rows: Sequence[SharedRow]) -> Image:
    """Copy rows, of which one at least is not empty; call it `SharedStore.at_work`. Lazy."""
    own = [one.row for one in rows if one.row is not None]
    store = shared.rows
    layer = store.layers[0]
    places: dict[PageId, int] = {}
    by_level: dict[int, list[int]] = {}
    for page in dict.fromkeys(page for row in own for page in row.pages):
        slots = by_level.setdefault(page.level, [])
        places[page] = len(slots)
        slots.append(page.slot)
    longest = max(1, *(row.tail_length for row in own))  # a file holds no empty array
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
    """Add an image's rows to a store, all or none; call it `SharedStore.at_work`.

    A scheme that the store does not have becomes its last one: that quantizes once more. Nobody
    holds the rows yet.
    """
    store = shared.prepared(image.geometry, image.dtype)
    shared.drain()
    levels = [_level(store.schemes, scheme) for scheme in image.schemes]
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
                store.take_hold(pages)
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
        store.let_go([page for pages in taken.values() for page in pages])
    return rows


def _level(schemes: tuple[Scheme, ...], scheme: Scheme) -> int:
    return schemes.index(scheme) if scheme in schemes else len(schemes) - 1


def _put_pages(store: LayerRows, target: int, image: Image, level: int) -> list[PageId]:
    """Write an image's pages of one level; the returned list holds each of them once."""
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
        store.let_go(pages)
        raise
    return pages


# Between stores.


def home_of(stores: Sequence[SharedStore]) -> SharedStore:
    """Return the store on which rows of all these can meet: a model's own, else the first.

    Raises ``ValueError`` if they do not attend to the same tokens.
    """
    kinds = {one.kind for one in stores}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.name for kind in kinds))
        raise ValueError(f"caches of different attention do not merge: {names}")
    return next((one for one in stores if one.home), stores[0])


@contextmanager
def together(
    *parts: tuple[SharedStore, Sequence[SharedRow]],
) -> Iterator[tuple[SharedStore, list[SharedRow]]]:
    """Bring rows of several stores to one, and hold them meanwhile; whoever wants them holds too.

    Rows that live elsewhere are copied. If one of them cannot be, none of the copies stays.
    """
    shared = home_of([store for store, _ in parts])
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
    """Return these rows on the target store, held: themselves, or copies of them."""
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
    """A cache's state: for `mx.eval` what is lazy, for whoever walks its items all of it.

    mlx-lm evaluates ``cache.state`` after each chunk of a prompt, and saves the same property to a
    file. A copy of all pages for each chunk would double the memory. `mx.eval` reads a dict in C
    and meets what awaits evaluation; `mlx.utils.tree_flatten` calls `items`.
    """

    def __init__(self, shared: SharedStore, rows: Sequence[SharedRow], *, batched: bool) -> None:
        with shared.at_work():
            super().__init__(lazy=shared.lazy_arrays())
        self._shared = shared
        self._rows = list(rows)
        self._batched = batched

    def items(self) -> Any:
        """Return the saved form: a header in JSON, packed pages by level, tails."""
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
    """Make a store of its own from a state; return it with its rows, and whether they were a batch.

    Raises ``ValueError`` if it is not the state of such a cache, or is damaged.
    """
    parts = dict(state.items()) if isinstance(state, Mapping) else {}
    found = _header(parts).get("format")
    if found != FORMAT:
        raise ValueError(
            f"this is no state of a quantized cache in format {FORMAT}, but"
            f" {found or type(state).__name__}"
        )
    try:
        shared, image, batched = _read(parts, _header(parts))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as wrong:
        raise ValueError(
            "this state of a quantized cache is damaged; make the cache anew from its prompt"
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
    """Return a state's store, still empty, and its rows, or how many empty ones it has."""
    window, keep, chunk = header["kind"]
    schemes = tuple(Scheme.parse(name) for name in header["schemes"])
    start, batched = int(header["quantized_start"]), bool(header["batched"])
    if len(schemes) < (2 if start else 1):
        raise ValueError("there is no scheme")
    shared = SharedStore(schemes, Kind(window, keep, chunk), quantized_start=start)
    if "tails" not in parts:
        if any(row is not None for row in header["rows"]):
            raise ValueError("tails are missing")
        return shared, len(header["rows"]), batched
    dtype = getattr(mx, header["dtype"])
    if not isinstance(dtype, mx.Dtype):
        raise TypeError(f"{dtype} is no dtype")
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
    """Raise ``ValueError`` if its arrays are not what its integers say."""
    counts = {}
    for level, sides in image.pages.items():
        pool = PagePool(image.geometry, image.schemes[level], image.dtype)
        pages = counts[level] = sides[0][0].shape[0]
        wanted = [(pages, *like.shape[1:], like.dtype) for like in pool.arrays()]
        if [(*array.shape, array.dtype) for side in sides for array in side] != wanted:
            raise ValueError(f"pages of {image.schemes[level].name} have other shapes than theirs")
    own = [row for row in image.rows if row is not None]
    g, tokens = image.geometry, image.tails[0].shape[2]
    for tails, dim in zip(image.tails, (g.k_dim, g.v_dim), strict=True):
        if tails.shape != (len(own), g.kv_heads, tokens, dim) or tails.dtype != image.dtype:
            raise ValueError("tails have another shape than their rows")
    for row in own:
        tail = row.length - PAGE_TOKENS * (len(row.pages) + row.skipped)
        if not (0 <= tail <= tokens <= TAIL_TOKENS and row.skipped >= 0):
            raise ValueError("a row has other tokens than its length says")
        if row.level not in range(len(image.schemes)):
            raise ValueError(f"a row is on level {row.level}")
        if not all(0 <= place < counts.get(level, 0) for level, place in row.pages):
            raise ValueError("a row has pages that are not there")


# mlx-lm's own caches.


def dense_parts(cache: Any) -> tuple[mx.array, mx.array] | None:
    """Return keys and values of mlx-lm's `KVCache`, `RotatingKVCache` or `QuantizedKVCache`.

    ``[batch, heads, tokens, dim]``, in the order of their positions; None if it is empty. Raises
    ``TypeError`` for other caches, ``ValueError`` if a rotating cache has overwritten tokens: what
    positions are left is gone too.
    """
    if type(cache) not in CONVERTIBLE:
        names = ", ".join(one.__name__ for one in CONVERTIBLE)
        raise TypeError(
            f"a {type(cache).__name__} does not convert, but {names} do; extract() the sequences"
            " of a batch, convert each and merge() them"
        )
    if cache.empty():
        return None
    if isinstance(cache, RotatingKVCache) and cache.offset > cache.max_size:
        raise ValueError(
            f"{cache.offset} tokens went into a rotating cache of {cache.max_size}: it can only be"
            " converted before it overwrites"
        )
    keys, values = cache.keys_and_values()
    if isinstance(cache, QuantizedKVCache):
        keys, values = (
            mx.dequantize(words, scales, biases, group_size=cache.group_size, bits=cache.bits)
            for words, scales, biases in (keys, values)
        )
    return keys[..., : cache.offset, :], values[..., : cache.offset, :]


def kv_cache_of(shared: SharedStore, row: Row | None) -> Any:
    """Return mlx-lm's `KVCache` or `RotatingKVCache` with what a row shows, dequantized."""
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
        cache._idx = len(seen)  # noqa: SLF001 - it has no other way in but its state
    cache.keys, cache.values = mx.contiguous(keys[None]), mx.contiguous(values[None])
    cache.offset = row.length
    return cache
