"""Simulated shortages of memory: `mx.eval` and `mx.async_eval` raise MLX's own errors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import mlx.core as mx
from mlx.utils import tree_flatten

UNABLE = "[malloc] Unable to allocate 1073741824 bytes."
LATE = (
    "[METAL] Command buffer execution failed: Insufficient Memory"
    " (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


class Evaluations:
    """Counts evaluations; those for which ``fails(number)`` is true run out of memory.

    A failing call evaluates half of its arrays, as if an allocation in the middle failed. A retry
    counts as another evaluation.
    """

    def __init__(self, fails: Callable[[int], bool], text: str = UNABLE) -> None:
        self.count = 0
        self.failed = 0
        self._fails = fails
        self._text = text

    def over(self, plain: Callable[..., None]) -> Callable[..., None]:
        def evaluate(*arrays: object) -> None:
            self.count += 1
            if not self._fails(self.count):
                plain(*arrays)
                return
            self.failed += 1
            flat = [one for _, one in tree_flatten(arrays) if isinstance(one, mx.array)]
            plain(flat[: len(flat) // 2])
            raise RuntimeError(self._text)

        return evaluate


@contextlib.contextmanager
def memory_runs_out(fails: Callable[[int], bool], text: str = UNABLE) -> Iterator[Evaluations]:
    """Make evaluations fail; calls of `mx.eval` and `mx.async_eval` are counted together.

    Objects of earlier tests are excluded from the garbage collections that follow each failure:
    in a process that has run thousands of tests each takes a second.
    """
    counted = Evaluations(fails, text)
    functions = (mx.eval, mx.async_eval)
    plain = [function.plain for function in functions]
    for function in functions:
        function.plain = counted.over(function.plain)
    gc.collect()
    gc.freeze()
    try:
        yield counted
    finally:
        for function, before in zip(functions, plain, strict=True):
            function.plain = before
