"""Kernels that write pages into pools and resize pools on CUDA: one launch for all arrays.

MLX takes one launch for each array that is written and three for each that grows. It writes in
place only if nothing else references the array, for which a flush must wait.

`put` writes into its input arrays, and MLX does not know of these writes. So it must be evaluated
after all steps that read the old pages, and its evaluation must end before anything reads the new
ones: `kvd.worker.cache.device_copy` writes on another stream. `prepare` compares the kernels with
plain copies, once for each shape; they are not used if they differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts.cuda_text import Argument, KernelText
from kvd.worker.cache import page_kernels
from kvd.worker.cache.page_kernels import WORD_BYTES, PageShape, slots_array, text_of
from kvd.worker.device import on_cuda
from kvd.worker.lean_imports import np

_log = logging.getLogger("kvd.worker")

_THREADS, _BLOCKS = 256, 256
_CHECK_SLOTS = (4, None, 1, 2, 6)

_prepared: dict[PageShape, bool] = {}
"""Whether the kernels are right, for each shape of a pool's arrays that was checked."""


def prepare(arrays: Sequence[mx.array]) -> None:
    """Compile and check the kernels for pages like those of ``arrays``, once for each shape."""
    shape = PageShape.of(arrays)
    if shape.fits and shape not in _prepared and on_cuda():
        try:
            _prepared[shape] = is_right(shape)
        except Exception as error:  # noqa: BLE001 - the model is served without the kernel
            _log.warning("pages are written without a kernel: %s", repr(error)[:500])
            _prepared[shape] = False


def is_prepared(shape: PageShape) -> bool:
    """Return whether `put` writes pages of this shape."""
    return _prepared.get(shape, False)


def put(
    shape: PageShape,
    arrays: Sequence[mx.array],
    slots: Sequence[int | None],
    pages: Sequence[mx.array],
) -> mx.array | None:
    """Write ``pages`` to ``slots`` of the first axes of ``arrays``, in place; lazy.

    Evaluate the result to write them. ``shape``: that of the arrays' pages. ``pages`` are
    contiguous and have the arrays' dtypes; those whose slot is None are left out. Returns None, and
    does nothing, if no kernel is prepared for such pages.
    """
    return _put(shape, arrays, slots, pages) if is_prepared(shape) else None


def resized(arrays: Sequence[mx.array], capacity: int) -> tuple[mx.array, ...] | None:
    """Return lazy copies of arrays of pages, with ``capacity`` pages; added ones are undefined.

    ``arrays``: a pool's keys or values. Returns None if no kernels are prepared, if there are no
    pages before or after, or if a page is no multiple of `WORD_BYTES`.
    """
    if not any(_prepared.values()) or not arrays[0].shape[0] or not capacity:
        return None
    shape = PageShape.of(arrays)
    return _resized(shape, arrays, capacity) if shape.fits else None


def _resized(shape: PageShape, arrays: Sequence[mx.array], capacity: int) -> tuple[mx.array, ...]:
    found: list[mx.array] = _resize_kernel(shape)(
        inputs=[mx.array([capacity, arrays[0].shape[0]], mx.int32), *arrays],
        grid=(_BLOCKS * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(capacity, *array.shape[1:]) for array in arrays],
        output_dtypes=[array.dtype for array in arrays],
    )
    return tuple(found)


def _put(
    shape: PageShape,
    arrays: Sequence[mx.array],
    slots: Sequence[int | None],
    pages: Sequence[mx.array],
) -> mx.array:
    filled = [array for array in arrays if array.size]
    (done,) = _put_kernel(shape)(
        inputs=[slots_array(tuple(slots)), *filled, *(page for page in pages if page.size)],
        grid=(_BLOCKS * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )
    found: mx.array = done
    return found


def put_source(shape: PageShape) -> str:
    """Return the body of a kernel; its inputs are ``slots``, ``a0`` etc., and pages ``b0`` etc."""
    parts = [*_GRID, "const int pages = slots_shape[0];"]
    for number, size in enumerate(shape.sizes):
        words = size // WORD_BYTES
        parts += [
            f"for (int at = me; at < pages * {words}; at += all) {{",
            f"  const int page = at / {words}, slot = slots[page];",
            f"  const long long to = (long long)slot * {words} + at - page * {words};",
            f"  if (slot >= 0) ((uint4*)a{number})[to] = ((const uint4*)b{number})[at];",
            "}",
        ]
    return "\n".join([*parts, "if (me == 0) done[0] = 1;"])


def resize_source(shape: PageShape) -> str:
    """Return the body of a kernel; its inputs are ``sizes`` (new, old) and ``a0`` etc."""
    parts = [*_GRID, "const long long pages = sizes[0] < sizes[1] ? sizes[0] : sizes[1];"]
    for number, size in enumerate(shape.sizes):
        parts += [
            f"for (long long at = me; at < pages * {size // WORD_BYTES}; at += all) {{",
            f"  ((uint4*)new{number})[at] = ((const uint4*)a{number})[at];",
            "}",
        ]
    return "\n".join(parts)


_GRID = (
    "const int me = blockIdx.x * blockDim.x + threadIdx.x;",
    "const int all = gridDim.x * blockDim.x;",
)


def is_right(shape: PageShape) -> bool:
    """Compare the kernels for a shape with plain copies of random bytes."""
    draw = np.random.default_rng(0)
    arrays, pages, wanted = list[mx.array](), list[mx.array](), list[Any]()
    for size, dtype in zip(shape.sizes, shape.dtypes, strict=True):
        content = draw.integers(0, 256, (len(_CHECK_SLOTS), size), np.uint8)
        want = np.zeros((8, size), np.uint8)
        for page, slot in zip(content, _CHECK_SLOTS, strict=True):
            if slot is not None:
                want[slot] = page
        arrays.append(mx.zeros((8, size // dtype.size), dtype))
        pages.append(mx.array(content).view(dtype))
        wanted.append(want)
    mx.eval(arrays, pages)
    mx.eval(_put(shape, arrays, _CHECK_SLOTS, pages))
    cut, grown = (_resized(shape, arrays, capacity) for capacity in (3, 11))
    mx.eval(cut, grown)
    return all(
        np.array_equal(np.array(array.view(mx.uint8)[: len(want)]), want)
        for found, count in ((arrays, 8), (cut, 3), (grown, 8))
        for array, want in zip(found, (want[:count] for want in wanted), strict=True)
    )


@lru_cache(32)
def _put_kernel(shape: PageShape) -> Any:
    return page_kernels.kernel_of(put_text(shape))


@lru_cache(32)
def _resize_kernel(shape: PageShape) -> Any:
    return page_kernels.kernel_of(resize_text(shape))


def put_text(shape: PageShape) -> KernelText:
    """Return the texts of a kernel; see `put_source`."""
    arrays = [
        Argument(f"{side}{number}", dtype)
        for side in "ab"
        for number, dtype in enumerate(shape.dtypes)
    ]
    inputs = Argument("slots", mx.int32), *arrays
    return text_of("put", put_source(shape), shape, inputs, (Argument("done", mx.uint32),))


def resize_text(shape: PageShape) -> KernelText:
    """Return the texts of a kernel; see `resize_source`."""
    old, new = (
        [Argument(f"{name}{number}", dtype) for number, dtype in enumerate(shape.dtypes)]
        for name in ("a", "new")
    )
    inputs = Argument("sizes", mx.int32), *old
    return text_of("resize", resize_source(shape), shape, inputs, tuple(new))
