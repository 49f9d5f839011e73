"""The limit of the freed buffers that MLX keeps for reuse, on CUDA.

At the limit, MLX returns each further buffer to the driver. A prefill pass fills the limit with
buffers that are too large for decode steps. Each operation of a step would then allocate and free
its memory, which takes 9 µs. So passes leave `STEP_BYTES` of the limit to steps.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.device import on_cuda

STEP_BYTES = 128 * 1024 * 1024
"""Bytes of freed buffers that only steps without a pass may add: a quarter of the smallest limit.
"""


class FreedBuffers:
    """The limit for one process. ``most``: in bytes, while no passes run."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._is_lower = False

    def prepare(self, *, prefills: bool) -> None:
        """Set the limit for the next step; ``prefills``: whether it has a pass."""
        if not on_cuda():
            return
        lower = self._most - STEP_BYTES
        # MLX frees what exceeds a limit at its next allocation. Until then the lower limit stays,
        # so that buffers of passes do not fill the room of steps.
        is_lower = prefills or (self._is_lower and mx.get_cache_memory() > lower)
        if is_lower != self._is_lower:
            self._is_lower = is_lower
            mx.set_cache_limit(lower if is_lower else self._most)
