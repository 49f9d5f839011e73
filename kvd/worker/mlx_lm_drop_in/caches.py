"""Drop-in caches for mlx-lm: paged, quantized, and batched by reference.

`DropInKVCache` replaces mlx-lm's `KVCache` and `BatchKVCache`; `DropInRotatingKVCache` replaces
`RotatingKVCache` and `BatchRotatingKVCache`. ``offset`` is an int, and an array after a merge.

Every cache is independent of all others. The caches of one layer share a `SharedStore`, which only
saves memory. `merge`, `extract`, `filter`, `extend` and copies move references; they copy no keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.scheme import PAGE_TOKENS, Scheme
from kvd.worker.mlx_lm_drop_in import convert
from kvd.worker.mlx_lm_drop_in.padding import Padding
from kvd.worker.mlx_lm_drop_in.shared_store import Reading, SharedRow, SharedStore


def schemes_of(scheme: str | Scheme, group_size: int, quantized_kv_start: int) -> list[Scheme]:
    """Return the schemes that a row passes through; with ``quantized_kv_start``, 16 bits first."""
    if isinstance(scheme, str):
        scheme = Scheme.parse(scheme, k_group=min(group_size, PAGE_TOKENS), v_group=group_size)
    return [Scheme(16, 16), scheme] if quantized_kv_start else [scheme]


class DropInKVCache:
    """One layer's keys and values of one or more sequences, in quantized pages of 64 tokens.

    ``scheme``, such as ``"k8v4"``, has the bits of keys and of values. ``group_size`` elements
    share a scale. The newest 64 to 127 tokens of each sequence are exact. Sequences shorter than
    ``quantized_kv_start`` tokens are not quantized.
    """

    def __init__(
        self, scheme: str | Scheme = "k8v4", *, group_size: int = 64, quantized_kv_start: int = 0
    ) -> None:
        schemes = schemes_of(scheme, group_size, quantized_kv_start)
        self.attach(SharedStore(schemes, FULL, quantized_start=quantized_kv_start), [SharedRow()])

    @classmethod
    def on(
        cls, shared: SharedStore, rows: Sequence[SharedRow] | None = None, *, batched: bool = False
    ) -> Self:
        """Return a cache of these rows on a store, or of one new sequence."""
        cache = cls.__new__(cls)
        cache.attach(shared, [SharedRow()] if rows is None else rows, batched=batched)
        return cache

    def attach(
        self, shared: SharedStore, rows: Sequence[SharedRow], *, batched: bool = False
    ) -> None:
        """Make this a cache of these rows. Constructors call it before anything else."""
        self.shared = shared
        with shared.at_work():
            self.rows = shared.hold(rows)
        self.padding = Padding.none(len(rows))
        self._batched = batched
        self._reading: Reading | None = None
        # The finalizer holds this list object, so later changes must be made in place.
        self._finalizer = weakref.finalize(self, shared.drop, self.rows)
        self._finalizer.atexit = False

    # Used by the model's forward pass.

    @property
    def offset(self) -> mx.array | int:
        """Position of the next token: an int, or ``[batch]`` int32 after a merge."""
        left = self.padding.left
        offsets = [one.length - padding for one, padding in zip(self.rows, left, strict=True)]
        return mx.array(offsets, mx.int32) if self._batched else offsets[0]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Reading, Reading]:
        """Append new tokens' keys and values, ``[batch, heads, tokens, dim]``.

        Returns a `Reading` twice, which only attention can use. Raises ``ValueError`` if the cache
        holds a different number of sequences.
        """
        batch, _, tokens, _ = keys.shape
        with self.shared.at_work():
            if not self._batched and len(self.rows) == 1 and batch > 1 and self.empty():
                # As in mlx-lm's KVCache, the first tokens decide the number of sequences.
                self.rows += self.shared.hold([SharedRow() for _ in range(batch - 1)])
                self.padding = Padding.none(batch)
            if batch != len(self.rows):
                raise ValueError(f"got {batch} sequences; this cache holds {len(self.rows)}")
            reading = self.shared.add(self.rows, self.padding.spans(tokens), keys, values)
        self._reading = reading if self.shared.keeps_reading else None
        return reading, reading

    def keys_and_values(self) -> tuple[Reading, Reading]:
        """Return the result of the newest `update_and_fetch`, for layers that share it.

        Raises ``RuntimeError`` outside of a forward pass. `dense` returns arrays at any time.
        """
        self.shared.asked_again = True
        if self._reading is None:
            raise RuntimeError("keys and values exist only during a forward pass; use dense()")
        return self._reading, self._reading

    def make_mask(
        self, n: int, window_size: int | None = None, *, return_array: bool = False, **_: Any
    ) -> None:
        """Return no mask.

        Raises ``TypeError`` if the model needs an array, or a window other than the cache's.
        """
        if window_size not in {None, self.kind.window}:
            raise TypeError(
                f"the model asks for a window of {window_size} tokens; this cache's attention is"
                f" {self.kind.name}"
            )
        if return_array and n > 1:
            raise TypeError("the model asks for a mask array")

    # Content.

    @property
    def kind(self) -> Kind:
        return self.shared.kind

    @property
    def scheme(self) -> Scheme:
        return self.shared.schemes[-1]

    @property
    def lengths(self) -> list[int]:
        return [one.length for one in self.rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __copy__(self) -> Self:
        copied = self.on(self.shared, self.rows, batched=self._batched)
        copied.padding = Padding(self.padding.left, self.padding.lengths)
        return copied

    def size(self) -> int:
        """Return the tokens of the longest sequence, at most the window."""
        longest = max(self.lengths, default=0)
        return longest if self.kind.window is None else min(longest, self.kind.window)

    def empty(self) -> bool:
        return not any(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and tails of this cache's sequences, without free pages.

        A page that several of these sequences share counts once. A page shared with another cache
        counts in both.
        """
        with self.shared.at_work():
            own = {one.row for one in self.rows if one.row is not None}
            if not own:
                return 0
            store = self.shared.rows
            pages = {page for row in own for page in row.held}
            paged = sum(store.pages.page_bytes(page.level) for page in pages)
            return paged + len(own) * store.tails.row_bytes

    def dense(self, index: int = 0) -> tuple[mx.array, mx.array]:
        """Return one sequence's keys and values as attention sees them, ``[heads, tokens, dim]``.

        Raises ``ValueError`` for an empty sequence.
        """
        with self.shared.at_work():
            row = self.rows[index].row
            if row is None:
                raise ValueError("the sequence is empty")
            return self.shared.rows.read(row, 0)

    # Removing tokens.

    def is_trimmable(self) -> bool:
        """Return whether `trim` works for every ``n``: no token has left a window."""
        return not any(one.row is not None and one.row.skipped for one in self.rows)

    def trim(self, n: int) -> int:
        """Remove the newest ``n`` tokens of each sequence, at most all. Returns how many.

        Raises ``ValueError`` if tokens that would be visible again have left a window.
        """
        n = min(n, max(self.lengths, default=0))
        with self.shared.at_work():
            self._reading = None
            self.shared.trim(self.rows, n)
        return n

    # Batches: only references move.

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """Return a batch of all these caches' sequences. The caches do not change.

        Caches of different stores are first copied into one store (`convert.together`). Raises
        ``TypeError`` for a different class, ``ValueError`` for a different window or key shape.
        """
        for cache in caches:
            cls._check(cache)
        parts = [(cache.shared, cache.rows) for cache in caches]
        with convert.together(*parts) as (shared, rows):
            return cls.on(shared, rows, batched=True)

    @classmethod
    def _check(cls, other: Any) -> None:
        if not isinstance(other, DropInKVCache):
            raise TypeError(
                f"cannot merge a {type(other).__name__} with a {cls.__name__}; convert it"
            )

    def extract(self, idx: int) -> Self:
        """Return a cache of one of the sequences. The batch keeps that sequence, too."""
        return self.on(self.shared, [self.rows[idx]])

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences at these indices, in that order."""
        indices = [int(index) for index in batch_indices]
        with self.shared.at_work():
            before = list(self.rows)
            self.rows[:] = self.shared.hold([before[index] for index in indices])
            self.padding = self.padding.picked(indices)
            self._reading = None
        self.shared.drop(before)

    def extend(self, other: Any) -> None:
        """Append another cache's sequences. Raises the errors of `merge`, with nothing changed."""
        self._check(other)
        padding = self.padding.joined(other.padding)
        parts = [(cache.shared, cache.rows) for cache in (self, other)]
        with convert.together(*parts) as (shared, rows):
            self._become(shared, rows, batched=True)
        self.padding = padding

    def _become(self, shared: SharedStore, rows: Sequence[SharedRow], *, batched: bool) -> None:
        drop_own = self._finalizer
        self.attach(shared, rows, batched=batched)
        drop_own()

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a padded batch. Its padding is neither stored nor attended to.

        ``left_padding``: number of padding tokens before each sequence's own tokens, for empty
        caches only. With ``right_padding``, ``lengths`` says how many of each sequence's next
        tokens are its own.
        """
        if left_padding is not None and any(left_padding):
            if not self.empty():
                raise ValueError("left padding can only be added to an empty cache")
            sums = zip(self.padding.left, left_padding, strict=True)
            self.padding.left = [before + int(more) for before, more in sums]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right padding needs the lengths of the sequences")
            self.padding.lengths = [int(length) for length in lengths]

    def finalize(self) -> None:
        """End the padding that `prepare` announced."""
        self.padding = Padding.none(len(self.rows))

    # mlx-lm's own caches.

    @classmethod
    def from_kv_cache(
        cls,
        cache: Any,
        scheme: str | Scheme = "k8v4",
        *,
        group_size: int = 64,
        quantized_kv_start: int = 0,
    ) -> Self:
        """Return a cache with the content of mlx-lm's `KVCache` or `RotatingKVCache`.

        Full pages are quantized by the scheme. Raises ``TypeError`` for other caches,
        ``ValueError`` if a rotating cache has overwritten tokens.
        """
        dense = convert.dense_parts(cache)
        kind = Kind(cache.max_size, cache.keep) if hasattr(cache, "max_size") else FULL
        schemes = schemes_of(scheme, group_size, quantized_kv_start)
        shared = SharedStore(schemes, kind, quantized_start=quantized_kv_start)
        if dense is None:
            return cls.on(shared)
        batch, _, tokens, _ = dense[0].shape
        made = cls.on(shared, [SharedRow() for _ in range(batch)])
        with shared.at_work():
            shared.fill(made.rows, made.padding.spans(tokens), *dense)
        return made

    @classmethod
    def from_quantized(cls, cache: Any, scheme: str | Scheme = "k8v4", **options: Any) -> Self:
        """Return a cache with the content of mlx-lm's `QuantizedKVCache`.

        The options are those of `from_kv_cache`. Full pages are quantized a second time, because
        mlx-lm quantizes keys per token, kvd per channel. That loses precision again.
        """
        return cls.from_kv_cache(cache, scheme, **options)

    def to_kv_cache(self) -> Any:
        """Return the sequence as mlx-lm's `KVCache`, or with a window as `RotatingKVCache`.

        It has exactly what attention sees here: dequantized pages, and the exact newest tokens.
        Raises ``ValueError`` for several sequences; `extract` them first.
        """
        if len(self.rows) != 1:
            raise ValueError(f"the cache holds {len(self.rows)} sequences: extract one")
        return convert.kv_cache_of(self.shared, self.rows[0].row)

    def to_quantized(self, group_size: int = 64, bits: int = 8) -> Any:
        """Return the sequence as mlx-lm's `QuantizedKVCache`, with pages quantized again.

        Raises ``NotImplementedError`` for windows, as mlx-lm does.
        """
        return self.to_kv_cache().to_quantized(group_size=group_size, bits=bits)

    # Files.

    @property
    def state(self) -> dict[str, Any]:
        """The cache's content, for mlx-lm's `save_prompt_cache` (`convert.State`)."""
        return convert.State(self.shared, self.rows, batched=self._batched)

    @state.setter
    def state(self, value: Any) -> None:
        shared, rows, batched = convert.restored(value)
        self._become(shared, rows, batched=batched)

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Return the cache whose `state` this was. It has its own store until it is merged.

        Raises ``ValueError`` if the state is damaged, or belongs to a different class of cache.
        """
        shared, rows, batched = convert.restored(state)
        return cls.on(shared, rows, batched=batched)


class DropInRotatingKVCache(DropInKVCache):
    """A `DropInKVCache` with a window of ``max_size`` tokens, including the first ``keep``.

    It does not rotate: pages that no later query sees are freed.
    """

    def __init__(
        self,
        max_size: int,
        keep: int = 0,
        scheme: str | Scheme = "k8v4",
        *,
        group_size: int = 64,
        quantized_kv_start: int = 0,
    ) -> None:
        schemes = schemes_of(scheme, group_size, quantized_kv_start)
        kind = Kind(window=max_size, keep=keep)
        self.attach(SharedStore(schemes, kind, quantized_start=quantized_kv_start), [SharedRow()])

    @property
    def max_size(self) -> int:
        assert self.kind.window is not None, "this class always has a window"
        return self.kind.window

    @property
    def keep(self) -> int:
        """Tokens at the beginning of the sequence that every query sees."""
        return self.kind.keep
