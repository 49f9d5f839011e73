"""Drop-in caches for mlx-lm: paged and quantized, and batched by reference.

`DropInKVCache` takes the place of mlx-lm's `KVCache` and `BatchKVCache`,
`DropInRotatingKVCache` that of `RotatingKVCache` and `BatchRotatingKVCache`. One class each
for one sequence and for many: ``offset`` is an int as long as nothing was merged.

Every cache is independent of all others, as mlx-lm expects; that those of one layer share a
`SharedStore` saves memory and nothing else. `merge`, `extract`, `filter`, `extend` and copies move
references: no key is copied, whatever the length.

Does not cover: the engine's own loop, which has its caches in `batch`; how a model gets these
caches (`kvd.worker.mlx_lm_drop_in.quantize_kv`); conversions and files (`convert`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.scheme import Scheme
from kvd.worker.mlx_lm_drop_in import convert
from kvd.worker.mlx_lm_drop_in.padding import Padding
from kvd.worker.mlx_lm_drop_in.shared_store import Reading, SharedRow, SharedStore


def schemes_of(scheme: str | Scheme, group_size: int, quantized_kv_start: int) -> list[Scheme]:
    """Return the schemes of a row's life: not quantized first where it starts later."""
    if isinstance(scheme, str):
        scheme = Scheme.parse(scheme, k_group=min(group_size, 64), v_group=group_size)
    return [Scheme(16, 16), scheme] if quantized_kv_start else [scheme]


class DropInKVCache:
    """One layer's keys and values of one or more sequences, in quantized pages of 64 tokens.

    ``scheme`` is such as ``"k8v4"``: bits of keys and of values, which have scales in common for
    ``group_size`` elements. The newest 64 to 127 tokens of each sequence are exact. A sequence is
    quantized from ``quantized_kv_start`` tokens on.
    """

    def __init__(
        self,
        scheme: str | Scheme = "k8v4",
        *,
        group_size: int = 64,
        quantized_kv_start: int = 0,
    ) -> None:
        schemes = schemes_of(scheme, group_size, quantized_kv_start)
        self.attach(SharedStore(schemes, FULL, quantized_start=quantized_kv_start), [SharedRow()])

    @classmethod
    def on(
        cls, shared: SharedStore, rows: Sequence[SharedRow] | None = None, *, batched: bool = False
    ) -> Self:
        """Make a cache on a store: of these rows, or of one new sequence."""
        cache = cls.__new__(cls)
        cache.attach(shared, [SharedRow()] if rows is None else rows, batched=batched)
        return cache

    def attach(
        self, shared: SharedStore, rows: Sequence[SharedRow], *, batched: bool = False
    ) -> None:
        """Be a cache of these rows; for makers of caches, before anything else."""
        self.shared = shared
        with shared.at_work():
            self.rows = shared.hold(rows)
        self.padding = Padding.none(len(rows))
        self._batched = batched
        self._reading: Reading | None = None
        # Holds the list itself, which every change therefore makes in place.
        self._finalizer = weakref.finalize(self, shared.drop, self.rows)
        self._finalizer.atexit = False

    # What the model's forward pass uses.

    @property
    def offset(self) -> mx.array | int:
        """Position of the next token: an int, or ``[batch]`` int32 once merged."""
        left = self.padding.left
        offsets = [one.length - padding for one, padding in zip(self.rows, left, strict=True)]
        return mx.array(offsets, mx.int32) if self._batched else offsets[0]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Reading, Reading]:
        """Take new tokens' keys and values, ``[batch, heads, tokens, dim]``.

        Returns a `Reading` twice, in the places of keys and values: only attention can use it
        (`kvd.worker.serving.seam`). Raises ``ValueError`` if the batch is not the one that the cache holds.
        """
        batch, _, tokens, _ = keys.shape
        with self.shared.at_work():
            if self._fits_a_first(batch):
                self.rows += self.shared.hold([SharedRow() for _ in range(batch - 1)])
                self.padding = Padding.none(batch)
            if batch != len(self.rows):
                raise ValueError(f"{batch} sequences came, this cache holds {len(self.rows)}")
            reading = self.shared.add(self.rows, self.padding.spans(tokens), keys, values)
        self._reading = reading if self.shared.keeps_reading else None
        return reading, reading

    def _fits_a_first(self, batch: int) -> bool:
        # As with mlx-lm's KVCache, the first tokens say how many sequences there are.
        return not self._batched and len(self.rows) == 1 and batch > 1 and self.empty()

    def keys_and_values(self) -> tuple[Reading, Reading]:
        """Return what the newest `update_and_fetch` returned, for layers that share it.

        Raises ``RuntimeError`` outside of a forward pass; `dense` has the numbers at any time.
        """
        self.shared.asked_again = True
        if self._reading is None:
            raise RuntimeError("keys and values are there during a forward pass only; see dense()")
        return self._reading, self._reading

    def make_mask(
        self, n: int, window_size: int | None = None, *, return_array: bool = False, **_: Any
    ) -> None:
        """Return no mask: attention sees by itself what each row may see.

        Raises ``TypeError`` where the model wants a mask of its own, or another window.
        """
        if window_size not in {None, self.kind.window}:
            raise TypeError(
                f"the model asks for a window of {window_size} tokens: {self.kind.name}"
            )
        if return_array and n > 1:
            raise TypeError("the model asks for a mask array")

    # What it holds.

    @property
    def kind(self) -> Kind:
        """Which earlier tokens are seen."""
        return self.shared.kind

    @property
    def scheme(self) -> Scheme:
        """The scheme that rows come to in the end."""
        return self.shared.schemes[-1]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [one.length for one in self.rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __copy__(self) -> Self:
        copied = self.on(self.shared, self.rows, batched=self._batched)
        copied.padding = Padding(self.padding.left, self.padding.lengths)
        return copied

    def size(self) -> int:
        """Return how many tokens the longest sequence has, at most the window."""
        longest = max(self.lengths, default=0)
        return longest if self.kind.window is None else min(longest, self.kind.window)

    def empty(self) -> bool:
        """Return whether no sequence has a token."""
        return not any(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and tails that this cache's sequences hold.

        A page that two of them share counts once; one that another cache shares counts in both.
        Free places in the pools, which all caches of the layer have in common, do not count.
        """
        return convert.held_bytes(self.shared, self.rows)

    def dense(self, index: int = 0) -> tuple[mx.array, mx.array]:
        """Return one sequence's keys and values as attention sees them, ``[heads, tokens, dim]``.

        A bounded window has what is still there. Raises ``ValueError`` for an empty sequence.
        """
        with self.shared.at_work():
            row = self.rows[index].row
            if row is None:
                raise ValueError("the sequence is empty")
            return self.shared.rows.read(row, 0)

    # Taking tokens back.

    def is_trimmable(self) -> bool:
        """Return whether any number of tokens could be taken back: nothing has fallen out yet."""
        return not any(one.row is not None and one.row.skipped for one in self.rows)

    def trim(self, n: int) -> int:
        """Take back each sequence's newest ``n`` tokens, as far as it has them; return how many.

        Raises ``ValueError`` if tokens that would be seen again have left a window.
        """
        n = min(n, max(self.lengths, default=0))
        with self.shared.at_work():
            self._reading = None
            self.shared.trim(self.rows, n)
        return n

    # Batches: references move, no key does.

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """Return a batch of all these caches' sequences; the caches stay as they are.

        Sequences of another store are copied to the one of the model's caches (`convert.together`).
        Raises ``TypeError`` for caches of another class, ``ValueError`` for another window or
        other keys; then nothing was copied.
        """
        for cache in caches:
            cls._check(cache)
        parts = [(cache.shared, cache.rows) for cache in caches]
        with convert.together(*parts) as (shared, rows):
            return cls.on(shared, rows, batched=True)

    @classmethod
    def _check(cls, other: Any) -> None:
        if not isinstance(other, DropInKVCache):
            raise TypeError(f"{type(other).__name__} and {cls.__name__} do not merge; convert it")

    def extract(self, idx: int) -> Self:
        """Return a cache of one of the sequences; the batch keeps it too."""
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
        """Append another cache's sequences; it may be used on, or dropped.

        Raises what `merge` raises; then this cache is as it was.
        """
        self._check(other)
        padding = self.padding.joined(other.padding)
        with convert.together((self.shared, self.rows), (other.shared, other.rows)) as (
            shared,
            rows,
        ):
            self._become(shared, rows, batched=True)
        self.padding = padding

    def _become(self, shared: SharedStore, rows: Sequence[SharedRow], *, batched: bool) -> None:
        """Be a cache of other rows, and let go of those it had."""
        let_go = self._finalizer
        self.attach(shared, rows, batched=batched)
        let_go()

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a padded batch: its padding is neither stored nor attended to.

        ``left_padding`` is in front of the next tokens, for empty caches only; of the coming
        tokens ``lengths`` of each sequence are its own, if ``right_padding`` has any.
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
        """End what `prepare` announced."""
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
        """Make a cache of mlx-lm's `KVCache` or `RotatingKVCache`, which stays as it is.

        Full pages are quantized, which loses what the scheme loses. Raises ``TypeError`` for other
        caches, ``ValueError`` if a rotating cache has overwritten tokens already.
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
        """Make a cache of mlx-lm's `QuantizedKVCache`, with `from_kv_cache`'s options.

        It quantizes keys per token and we do per channel: what it lost stays lost, and full pages
        lose once more.
        """
        return cls.from_kv_cache(cache, scheme, **options)

    def to_kv_cache(self) -> Any:
        """Return mlx-lm's `KVCache`, for a window `RotatingKVCache`, of the one sequence.

        It has what attention sees here: dequantized pages, and the exact newest tokens. Nothing is
        lost on the way. Raises ``ValueError`` for several sequences; `extract` them first.
        """
        if len(self.rows) != 1:
            raise ValueError(f"the cache holds {len(self.rows)} sequences: extract one")
        return convert.kv_cache_of(self.shared, self.rows[0].row)

    def to_quantized(self, group_size: int = 64, bits: int = 8) -> Any:
        """Return mlx-lm's `QuantizedKVCache` of the one sequence.

        Its groups run along a token's channels: pages are quantized again, and the newest tokens
        for the first time. Raises ``NotImplementedError`` for windows, as mlx-lm does.
        """
        return self.to_kv_cache().to_quantized(group_size=group_size, bits=bits)

    # Files.

    @property
    def state(self) -> dict[str, Any]:
        """All that the cache holds, as mlx-lm's `save_prompt_cache` writes it (`convert.State`)."""
        return convert.State(self.shared, self.rows, batched=self._batched)

    @state.setter
    def state(self, value: Any) -> None:
        shared, rows, batched = convert.restored(value)
        self._become(shared, rows, batched=batched)

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Make the cache that `state` was of; it has a store of its own until it is merged.

        Raises ``ValueError`` if it is of another kind of cache, or damaged.
        """
        shared, rows, batched = convert.restored(state)
        return cls.on(shared, rows, batched=batched)


class DropInRotatingKVCache(DropInKVCache):
    """The same for a window: each query sees ``max_size`` tokens, of which the first ``keep``.

    Nothing rotates: pages that no later query sees are freed.
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
        """Tokens that a query sees."""
        assert self.kind.window is not None, "this class is made with a window"
        return self.kind.window

    @property
    def keep(self) -> int:
        """Of which the first so many of the whole sequence."""
        return self.kind.keep
