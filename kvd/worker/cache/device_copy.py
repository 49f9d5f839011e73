"""Copies pages from page-locked memory into evaluated arrays, by a CUDA kernel.

To take an array's address on the host would move the whole array to managed memory. A kernel has
the address on the device. It reads the record over the bus, so the copy needs neither
memory on the device nor another copy there, and steps in flight compute meanwhile.

The kernel writes into its inputs, which MLX does not know. So each kernel is compared with a plain
copy before its first use (`prepare`), and is not used if it differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx

from kvd.worker.artifacts.cuda_text import Argument
from kvd.worker.cache import cuda_driver
from kvd.worker.cache.page_kernels import (
    WORD_BYTES,
    PageShape,
    kernel_of,
    slots_array,
    text_of,
)
from kvd.worker.lean_imports import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("kvd.worker")

_Bytes: TypeAlias = "NDArray[np.uint8]"
_THREADS, _BLOCKS = 256, 128
_CHECK_PAGES = 5


_prepared: dict[PageShape, bool] = {}
"""Whether the kernel of a shape is right, for each shape that was checked."""


def prepare(arrays: Sequence[mx.array]) -> None:
    """Compile and check the kernel for pages like those of ``arrays``, once for each shape."""
    shape = PageShape.of(arrays)
    if shape.fits and shape not in _prepared and cuda_driver.is_usable():
        try:
            _prepared[shape] = is_right(shape)
        except Exception as error:  # noqa: BLE001 - the model is served without the kernel
            _log.warning("stored prefixes are copied without a kernel: %s", repr(error)[:500])
            _prepared[shape] = False


def is_used() -> bool:
    """Return whether `copy` copies pages of some shape."""
    return any(_prepared.values())


def copy(
    arrays: Sequence[mx.array], slots: Sequence[int | None], record: _Bytes
) -> Callable[[], None] | None:
    """Begin to copy a record to ``slots`` of the arrays' first axes; return a function that waits.

    Slots that are None are left out. Returns None, and does nothing, if the record is not in
    page-locked memory or no kernel is prepared for these arrays.
    """
    if not _prepared or not _prepared.get(shape := PageShape.of(arrays)):
        return None
    address = cuda_driver.device_address(record.__array_interface__["data"][0], record.nbytes)
    if address is None or address % WORD_BYTES:
        return None
    return _run(shape, arrays, slots, address)


def _run(
    shape: PageShape, arrays: Sequence[mx.array], slots: Sequence[int | None], address: int
) -> Callable[[], None]:
    filled = [array for array in arrays if array.size]
    (done,) = _kernel(shape)(
        inputs=[_place(address), slots_array(tuple(slots)), *filled],
        grid=(_BLOCKS * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
        stream=_stream(),
    )
    mx.async_eval(done)  # type: ignore[no-untyped-call]
    return partial(mx.eval, done)


def source_of(shape: PageShape) -> str:
    """Return the body of the kernel; its inputs are ``place``, ``slots``, ``a0``, ``a1`` etc."""
    parts = [
        "const uint4* content = (const uint4*)place[0];",
        "const int pages = slots_shape[0];",
        "const int me = blockIdx.x * blockDim.x + threadIdx.x;",
        "const int all = gridDim.x * blockDim.x;",
    ]
    for number, size in enumerate(shape.sizes):
        words = size // WORD_BYTES
        parts += [
            f"for (int at = me; at < pages * {words}; at += all) {{",
            f"  const int page = at / {words}, slot = slots[page];",
            f"  const long to = (long)slot * {words} + at - page * {words};",
            f"  if (slot >= 0) ((uint4*)a{number})[to] = content[at];",
            "}",
            f"content += pages * {words};",
        ]
    return "\n".join([*parts, "if (me == 0) done[0] = 1;"])


def is_right(shape: PageShape) -> bool:
    """Compare the kernel of a shape with a plain copy of random bytes."""
    nbytes = _CHECK_PAGES * sum(shape.sizes)
    content = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    unlock = cuda_driver.lock(content.data)
    address = cuda_driver.device_address(content.__array_interface__["data"][0], nbytes)
    slots: list[int | None] = [4, None, 1, 2, 6]
    arrays = [
        mx.zeros((8, size // dtype.size), dtype)
        for size, dtype in zip(shape.sizes, shape.dtypes, strict=True)
    ]
    try:
        if address is None:
            return False
        mx.eval(arrays)
        _run(shape, arrays, slots, address)()
    finally:
        unlock()
    return all(
        np.array_equal(np.array(array.view(mx.uint8)), want)
        for array, want in zip(arrays, _expected(shape, slots, content), strict=True)
    )


def _expected(shape: PageShape, slots: Sequence[int | None], content: Any) -> list[Any]:
    found, start = [], 0
    for size in shape.sizes:
        pages = np.zeros((8, size), np.uint8)
        for at, slot in enumerate(slots):
            if slot is not None:
                pages[slot] = content[start + at * size : start + (at + 1) * size]
        found.append(pages)
        start += len(slots) * size
    return found


@lru_cache(128)
def _place(address: int) -> mx.array:
    place = mx.array([address], mx.uint64)
    mx.eval(place)
    return place


@cache
def _stream() -> mx.Stream:
    """Return a stream other than that of the steps."""
    return mx.new_stream(mx.Device(mx.DeviceType.gpu))


@lru_cache(32)
def _kernel(shape: PageShape) -> Any:
    arrays = (Argument(f"a{number}", dtype) for number, dtype in enumerate(shape.dtypes))
    inputs = Argument("place", mx.uint64), Argument("slots", mx.int32), *arrays
    outputs = (Argument("done", mx.uint32),)
    return kernel_of(text_of("pages", source_of(shape), shape, inputs, outputs))
