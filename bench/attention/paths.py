"""The compared ways to attend, each with the bytes it reads and its error bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import mlx.core as mx

from bench.attention.case import CALLS, COLD_BYTES, Case, Shape, layers_for
from bench.attention.timing import Call
from bench.attention.truth import attended, error_over_pages, relative_error
from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.fused import FusedStep, Kernels
from kvd.worker.attention.kernels.fused import Fused
from kvd.worker.attention.kernels.launch import find_language
from kvd.worker.cache.page_tables import PageList
from kvd.worker.native import build
from kvd.worker.native.step import NativeStep

FUSED_ERROR = {mx.bfloat16: 2e-3, mx.float16: 2e-3, mx.float32: 1e-5}
ROUNDED_ERROR = 1e-2
"""Error bound of MLX's own operations, which multiply in half precision or TF32."""


class NoKernelsError(RuntimeError):
    """The device has no fused kernels."""


@dataclass(frozen=True)
class Path(ABC):
    """One way to attend on one shape."""

    name: str
    nbytes: int
    """Bytes that a call reads."""
    is_cold: bool
    call: Call
    queries: mx.array
    """``[calls, rows, q_heads, 1, dim]``."""
    bound: float

    @abstractmethod
    def error(self, got: mx.array) -> float:
        """Return the relative error of the first call's result."""


@dataclass(frozen=True)
class _Pages(Path):
    case: Case

    def error(self, got: mx.array) -> float:
        """Compare the first and the last row with float32 attention to the dequantized pages."""
        return error_over_pages(self.case, 0, got)


def _over(case: Case, name: str, call: Call, bound: float) -> Path:
    return _Pages(name, case.nbytes, case.is_cold, call, case.queries, bound, case)


def reference(case: Case) -> Path:
    """Use gathered pages and MLX's own operations, which every device has."""

    def call(number: int, queries: mx.array) -> mx.array:
        return decode_attention(queries, case.handle(number), case.shape.scale)

    return _over(case, f"reference {case.scheme.name}", call, ROUNDED_ERROR)


def native(case: Case) -> Path:
    """Use kvd's C++ operations, on the CPU in float32."""
    library = build.load()
    step = NativeStep.of(library, case.store.kind, case.rows, PageList.of(case.rows))

    def call(number: int, queries: mx.array) -> mx.array:
        return step.attend(queries, case.handle(number).layer, case.shape.scale, None)

    return _over(case, f"native {case.scheme.name}", call, FUSED_ERROR[case.dtype])


@dataclass(frozen=True)
class _Dense(Path):
    shape: Shape
    keys: mx.array
    values: mx.array

    def error(self, got: mx.array) -> float:
        """Compare the first and the last row with float32 attention to their unpadded keys."""
        errors = []
        for place in sorted({0, len(self.shape.lengths) - 1}):
            mine = slice(-self.shape.lengths[place] - 1, None)
            keys, values = (
                side[place, :, mine].astype(mx.float32) for side in (self.keys, self.values)
            )
            queries = self.queries[0, place, :, 0].astype(mx.float32)
            want = attended(queries, keys, values, self.shape.scale)
            errors.append(relative_error(got[place, :, 0], want))
        return max(errors)


def dense(shape: Shape, dtype: mx.Dtype, *, masked: bool) -> Path:
    """Use MLX's dense kernel over a left-padded rectangle, as in mlx-lm's batches.

    ``masked`` passes a mask. Rows of equal length need none, but mlx-lm's batches always pass one.
    """
    mx.random.seed(1)
    rows, most = len(shape.lengths), max(shape.lengths) + 1
    nbytes = rows * most * shape.kv_heads * 2 * shape.dim * dtype.size
    size = (rows, shape.kv_heads, most, shape.dim)
    layers = []
    for _ in range(layers_for(nbytes)):
        layers.append([mx.random.normal(size).astype(dtype) for _ in range(2)])
        mx.eval(layers[-1])
    queries = mx.random.normal((CALLS, rows, shape.q_heads, 1, shape.dim)).astype(dtype)
    starts = mx.array([most - length - 1 for length in shape.lengths])
    mask = (mx.arange(most) >= starts[:, None])[:, None, None] if masked else None
    mx.eval(queries, [] if mask is None else mask)

    def call(number: int, queries: mx.array) -> mx.array:
        keys, values = layers[number % len(layers)]
        found: mx.array = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=shape.scale, mask=mask
        )
        return found

    cold = len(layers) * nbytes >= COLD_BYTES
    name = "dense, masked" if masked else "dense"
    return _Dense(name, nbytes, cold, call, queries, ROUNDED_ERROR, shape, *layers[0])


def kernels() -> Kernels:
    """Return the kernels of this device."""
    language = find_language()
    if language is None:
        raise NoKernelsError("there are no fused kernels for this device")
    return Fused(language)


def fused(case: Case) -> Path:
    """Use the fused kernels."""
    step = FusedStep.of(kernels(), case.store.kind, case.rows, PageList.of(case.rows))

    def call(number: int, queries: mx.array) -> mx.array:
        return step.attend(queries, case.handle(number).layer, case.shape.scale, None)

    return _over(case, f"fused {case.scheme.name}", call, FUSED_ERROR[case.dtype])
