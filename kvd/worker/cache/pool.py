"""The pages of one layer at one precision level: arrays that are written in place.

MLX updates an array in place only if nothing else references its buffer. An operation in flight
that reads the buffer references it, and then the update silently copies the whole pool. Callers of
`write` must therefore wait until the device is idle. `grow` and `cut` copy pools, and wait for the
copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial

import mlx.core as mx

from kvd.worker.cache import device_pages
from kvd.worker.cache import packed as pk
from kvd.worker.cache.host_copy import put_entries
from kvd.worker.cache.packed import Packed, Slots
from kvd.worker.cache.page_kernels import PageShape
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.together import Replacement, replace_all
from kvd.worker.device import on_cpu


class PagePool:
    """Storage for ``capacity`` pages of one layer.

    Keys are ``[capacity, heads, k_dim, 64]`` per channel; values ``[capacity, heads, 64, v_dim]``
    per token, or ``[capacity, heads, v_dim, 64]`` per channel (`LayerGeometry.values`).
    """

    def __init__(self, geometry: LayerGeometry, scheme: Scheme, dtype: mx.Dtype) -> None:
        self.geometry = geometry
        self.scheme = scheme
        self.key_packing = geometry.keys(scheme)
        self.value_packing = geometry.values(scheme)
        self.dtype = dtype
        self.keys = self._empty_keys(0)
        self.values = self._empty_values(0)
        self._views: list[mx.array] | None = None
        """What `views` returned; None after a change of the arrays."""
        self._page_bytes = [
            geometry.kv_heads * packing.page_bytes(dim, geometry.itemsize)
            for packing, dim in (
                (self.key_packing, geometry.k_dim),
                (self.value_packing, geometry.v_dim),
            )
        ]

    def _empty_keys(self, pages: int) -> Packed:
        g = self.geometry
        return pk.empty(pages, g.kv_heads, g.k_dim, PAGE_TOKENS, self.key_packing, self.dtype)

    def _empty_values(self, pages: int) -> Packed:
        g = self.geometry
        shape = (PAGE_TOKENS, g.v_dim) if self.value_packing.per_token else (g.v_dim, PAGE_TOKENS)
        return pk.empty(pages, g.kv_heads, *shape, self.value_packing, self.dtype)

    @property
    def capacities(self) -> tuple[int, int]:
        """Pages that keys and values have room for. They differ while the pool is being resized."""
        return self.keys[0].shape[0], self.values[0].shape[0]

    @property
    def capacity(self) -> int:
        return min(self.capacities)

    @property
    def side_bytes(self) -> tuple[int, int]:
        keys, values = self.capacities
        return keys * self._page_bytes[0], values * self._page_bytes[1]

    @property
    def nbytes(self) -> int:
        return sum(self.side_bytes)

    def arrays(self) -> list[mx.array]:
        return [*self.keys, *self.values]

    def views(self) -> list[mx.array]:
        """Return arrays for kernels of compiled steps, which read only their addresses.

        They are views of the first page, so their shapes do not depend on the capacity, and a step
        need not be compiled again when the pool is resized. To compile takes 14 ms for 28 layers.
        If no kernel writes the pool, they are `arrays`: MLX copies an array that has a view.
        """
        if self._views is None:
            found = self.arrays()
            if self.is_written_by_kernel:
                found = [array[:1] for array in found]
                mx.async_eval(found)  # type: ignore[no-untyped-call]
            self._views = found
        return self._views

    @property
    def view_capacities(self) -> tuple[int, int]:
        """Pages of `views`, keys and values."""
        views = self.views()
        return views[0].shape[0], views[len(self.keys)].shape[0]

    @cached_property
    def page_shape(self) -> PageShape:
        return PageShape.of(self.arrays())

    @property
    def is_written_by_kernel(self) -> bool:
        """Whether `store` writes pages by a kernel."""
        return device_pages.is_prepared(self.page_shape)

    @property
    def array_count(self) -> int:
        return len(self.keys) + len(self.values)

    def put(self, given: Iterator[mx.array]) -> None:
        """Replace `arrays` by the next arrays of an iterator, in the same order."""
        self.keys = tuple(next(given) for _ in self.keys)
        self.values = tuple(next(given) for _ in self.values)

    def pack(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Quantize whole pages, dense ``[pages, heads, 64, dim]``; lazy."""
        k = pk.pack(keys.swapaxes(-1, -2), self.key_packing)
        v = values if self.value_packing.per_token else values.swapaxes(-1, -2)
        return k, pk.pack(v, self.value_packing)

    def unpack(self, keys: Packed, values: Packed) -> tuple[mx.array, mx.array]:
        """Dequantize what `pack` returned: dense ``[pages, heads, 64, dim]`` of both; lazy."""
        k = pk.unpack(keys, self.key_packing).swapaxes(-1, -2)
        v = pk.unpack(values, self.value_packing)
        return k, (v if self.value_packing.per_token else v.swapaxes(-1, -2))

    def read(
        self,
        slots: mx.array | Slots,
        heads: slice = slice(None),
        source: tuple[Packed, Packed] | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values of some heads, dense ``[pages, heads, 64, dim]``; lazy.

        ``source``: what `pack` returned, to read from instead of the pool.
        """
        sides = source or (self.keys, self.values)
        keys, values = (pk.take(side, slots, heads) for side in sides)
        return self.unpack(keys, values)

    def copy(self, slots: mx.array) -> tuple[Packed, Packed]:
        """Return packed copies of the pages at ``slots``; lazy."""
        return pk.take(self.keys, slots), pk.take(self.values, slots)

    def converted(self, slots: mx.array, target: PagePool) -> tuple[Packed, Packed]:
        """Return copies of the pages at ``slots`` in the packing of ``target``; lazy."""
        keys, values = self.copy(slots)
        dense_keys, dense_values = self.unpack(keys, values)
        new_keys, new_values = target.pack(dense_keys, dense_values)
        # Keys or values whose packing stays the same are not quantized again: precision would be
        # lost.
        return (
            keys if self.key_packing == target.key_packing else new_keys,
            values if self.value_packing == target.value_packing else new_values,
        )

    def store(
        self, slots: Sequence[int | None], keys: Packed, values: Packed
    ) -> Sequence[mx.array]:
        """Store contiguous pages in the fastest way; return the arrays whose evaluation does it.

        With a kernel (`device_pages`), pages may be lazy, and those whose slot is None are left
        out. Otherwise they must have been evaluated.
        """
        done = device_pages.put(self.page_shape, self.arrays(), slots, (*keys, *values))
        if done is not None:
            return [done]
        places = [slot for slot in slots if slot is not None]
        (self.write_in_place if on_cpu() else self.write)(places, keys, values)
        return self.arrays()

    def write(self, slots: Sequence[int], keys: Packed, values: Packed) -> None:
        """Store packed pages at ``slots``; lazy, in place once evaluated."""
        # On the CPU, a slice of 16 pages of 8 heads is written in 0.6 ms, a scatter in 2.7 ms.
        where: slice | mx.array = slice(slots[0], slots[0] + len(slots))
        if any(slot != at for at, slot in enumerate(slots, slots[0])):
            where = mx.array(list(slots))
        for mine, new in ((self.keys, keys), (self.values, values)):
            for target, source in zip(mine, new, strict=True):
                if target.size:  # a scatter into an empty array ends the process (mlx 0.32.4, CPU)
                    # An array that is written as a whole is replaced by the source with its
                    # strides. Dense keys are transposed, but C++ reads pools as contiguous memory.
                    whole = len(slots) == target.shape[0]
                    target[where] = mx.contiguous(source) if whole else source

    def write_in_place(self, slots: Sequence[int], keys: Packed, values: Packed) -> None:
        """Store evaluated, contiguous pages at ``slots``, on a CPU; the device must be idle.

        `write` copies element by element and takes an evaluation. This is a `memcpy`.
        """
        for mine, new in ((self.keys, keys), (self.values, values)):
            for target, source in zip(mine, new, strict=True):
                put_entries(target, slots, source)

    def grow(self, capacity: int) -> None:
        """Add pages of undefined content up to ``capacity``; evaluates."""
        replace_all(self.grown(capacity))

    def cut(self, capacity: int) -> None:
        """Keep only the first ``capacity`` pages; evaluates."""
        replace_all(self.shortened(capacity))

    def grown(self, capacity: int) -> Iterator[Replacement]:
        """Yield copies of the keys and of the values with more pages, where there are fewer."""
        for side in (0, 1):
            if self.capacities[side] < capacity:
                yield self._replacement(side, capacity)

    def shortened(self, capacity: int) -> Iterator[Replacement]:
        """Yield copies of the keys and of the values with fewer pages, where there are more."""
        for side in (0, 1):
            if self.capacities[side] > capacity:
                yield self._replacement(side, capacity)

    def resize(self, side: int, capacity: int) -> None:
        """Give keys (side 0) or values (1) room for ``capacity`` pages, by a copy; evaluates."""
        replace_all([self._replacement(side, capacity)])

    def _replacement(self, side: int, capacity: int) -> Replacement:
        new, copied_pages = self._resized(side, capacity)
        copied_bytes = copied_pages * self._page_bytes[side]
        return Replacement(new, partial(self._put_side, side, new), copied_bytes)

    def resize_behind_steps(self, side: int, capacity: int) -> list[mx.array]:
        """Resize without waiting: the device copies behind the steps in flight.

        Returns small arrays that are evaluated once the copies are made. References to the new
        arrays themselves would keep their memory after the pool is cut.
        """
        new, _ = self._resized(side, capacity)
        marks = [array.reshape(-1)[:1] + 0 for array in new]
        mx.async_eval(*new, *marks)  # type: ignore[no-untyped-call]
        self._put_side(side, new)
        return marks

    def _resized(self, side: int, capacity: int) -> tuple[Packed, int]:
        """Return a side's arrays with another capacity, and how many pages exist twice then."""
        old, count = (self.keys, self.values)[side], self.capacities[side]
        if (found := device_pages.resized(old, capacity)) is not None:
            return found, min(count, capacity)
        if capacity < count:  # copies: a slice would keep the whole buffer alive
            return tuple(mx.contiguous(array[:capacity]) for array in old), capacity
        added = (self._empty_keys, self._empty_values)[side](capacity - count)
        if not count:
            return added, 0
        pairs = zip(old, added, strict=True)
        return tuple(mx.concatenate(list(pair)) for pair in pairs), capacity

    def _put_side(self, side: int, new: Packed) -> None:
        self._views = None  # they would keep the memory of the old arrays
        if side == 0:
            self.keys = new
        else:
            self.values = new


def compile_modules(dtypes: Iterable[mx.Dtype]) -> None:
    """Compile the modules for pages that are not adjacent: to read and write them on CUDA.

    ``dtypes``: those of the pools' arrays. A module takes several seconds, and the first such page
    may come long after the load, while rows wait for it.
    """
    slots = mx.array([0, 2], mx.int32)
    for dtype in set(dtypes):
        target = mx.zeros((3, 1), dtype)
        target[slots] = mx.ones((2, 1), dtype)
        mx.eval(target[slots])
