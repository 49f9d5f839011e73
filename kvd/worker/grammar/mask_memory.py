"""Host memory for the masks of a step, and their upload to the device.

On CUDA, MLX copies an array of the host when it is first used: 0.3 ms of the host's time and 0.8 of
the device's for the masks of eight rows (H200, 150 KB). A kernel that reads page-locked memory over
the bus takes 0.02 ms. On other devices memory is shared, and masks are plain
arrays.
"""

from __future__ import annotations

import mmap
import weakref
from functools import lru_cache
from typing import Any

import mlx.core as mx

from kvd.worker.attention.kernels import launch
from kvd.worker.attention.kernels.language import CUDA
from kvd.worker.attention.kernels.launch import Launch, kernel_name
from kvd.worker.cache import cuda_driver
from kvd.worker.grammar.matcher import Mask
from kvd.worker.lean_imports import np

_BUFFERS = 3
"""Steps whose masks exist at once: one is being written, two are launched and not read."""
_ROWS = 8
"""Rows of a buffer are rounded up to a multiple of this."""
_THREADS = 256
_WORD = 4
"""Bytes that a thread copies."""


class MaskMemory:
    """Page-locked memory for the masks of one engine's steps, if MLX computes with CUDA.

    ``row_bytes``: bytes of one mask, a multiple of 4. Only the engine's thread may use it.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._buffers: list[_Buffer] = []
        """Least recently used first."""

    def take(self, rows: int) -> Mask:
        """Return memory for the masks of a step, ``[rows, bytes]``, with undefined content."""
        if not rows or not cuda_driver.is_usable():
            return np.empty((rows, self._row_bytes), np.uint8)
        buffer = self._oldest(rows)
        self._buffers.append(buffer)
        return buffer.masks[:rows]

    def upload(self, masks: Mask) -> Any:
        """Return the masks as an array, lazily: ``[rows, bytes]`` uint8.

        ``masks``: from the last `take`. They must not change after this call. `take` returns their
        memory again once the device has read it.
        """
        if not self._buffers:
            return mx.array(masks)
        uploaded = self._buffers[-1].upload(masks)
        return mx.array(masks) if uploaded is None else uploaded

    def _oldest(self, rows: int) -> _Buffer:
        """Return a buffer that no kernel reads any more, with room for these rows."""
        if len(self._buffers) < _BUFFERS:
            return _Buffer(rows, self._row_bytes)
        buffer = self._buffers.pop(0)
        buffer.wait()
        return buffer if rows <= len(buffer.masks) else _Buffer(rows, self._row_bytes)


class _Buffer:
    def __init__(self, rows: int, row_bytes: int) -> None:
        rows = -(-rows // _ROWS) * _ROWS
        # Pages of its own: the driver locks whole pages.
        memory = memoryview(mmap.mmap(-1, rows * row_bytes, flags=mmap.MAP_PRIVATE))
        self.masks: Mask = np.frombuffer(memory, np.uint8).reshape(rows, row_bytes)
        weakref.finalize(self, cuda_driver.lock(memory))
        self._uploaded: Any = None

    def upload(self, masks: Mask) -> Any:
        """Return an array that a kernel copies from here; None: the memory is not locked."""
        address = cuda_driver.device_address(masks.ctypes.data, masks.nbytes)
        if address is None:
            return None
        copied = launch.run(
            copy_launch(_place(address, masks.nbytes // _WORD), *masks.shape), CUDA
        )[0]
        self._uploaded = copied.view(mx.uint8)
        return self._uploaded

    def wait(self) -> None:
        """Wait until the last masks were copied."""
        if self._uploaded is not None:
            mx.eval(self._uploaded)
            self._uploaded = None


def copy_launch(place: mx.array, rows: int, row_bytes: int) -> Launch:
    """Return the launch that copies masks, ``[rows, words]`` uint32.

    ``place``: their address and number of words, ``[2]`` uint64.
    """
    words = row_bytes // _WORD
    text = """
const uint64_t at = blockIdx.x * blockDim.x + threadIdx.x;
if (at < place[1]) copied[at] = ((const uint32_t*)place[0])[at];
"""
    return Launch(
        name=kernel_name("masks", text),
        input_names=("place",),
        output_names=("copied",),
        source=text,
        header="",
        inputs=[place],
        output_shapes=[(rows, words)],
        output_dtypes=[mx.uint32],
        grid=(-(-rows * words // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        template=(),
    )


@lru_cache(64)
def _place(address: int, words: int) -> mx.array:
    place = mx.array([address, words], mx.uint64)
    mx.eval(place)
    return place
