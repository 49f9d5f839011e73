"""Replaces functions of MLX with operations of the library.

`mx.fast.rms_norm`, `mx.fast.rope` and mlx-lm's `swiglu` are chains of operations on the CPU, and
`mx.quantize` runs on one thread. `install` replaces each with one
operation for float32 on the CPU; all other calls go to MLX. Norms differ from MLX's only by
rounding, and quantized values not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import activations

_rms_norm = mx.fast.rms_norm
_rope = mx.fast.rope
_swiglu = activations.swiglu
_quantize = mx.quantize
_paused = False


class _Functions:
    """Replacements of MLX's functions, with the same arguments."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library

    def rms_norm(
        self, x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None
    ) -> mx.array:
        fits = weight is None or (weight.dtype == mx.float32 and weight.shape == x.shape[-1:])
        supported = x.dtype == mx.float32 and fits and not _paused
        if not supported or stream is not None or not x.size:
            return _rms_norm(x, weight, eps, stream=stream)
        return cast(mx.array, self._library.rms_norm(x, weight, eps))

    def rope(
        self,
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        rates = None
        supported = a.dtype == mx.float32 and a.ndim == 4 and not _paused
        if supported and a.size and stream is None:
            rates = rotation_rates(dims, base, freqs, a.shape[-1])
        positions = None if rates is None else _positions(offset, a.shape[0])
        if rates is None or positions is None:  # MLX handles it or raises
            return _rope(
                a,
                dims,
                traditional=traditional,
                base=base,
                scale=scale,
                offset=offset,
                freqs=freqs,
                stream=stream,
            )
        return cast(mx.array, self._library.rope(a, positions, rates, traditional, scale))

    def swiglu(self, gate: mx.array, x: mx.array) -> mx.array:
        supported = gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape and not _paused
        if not supported or not x.size or not x.ndim:
            return cast(mx.array, _swiglu(gate, x))
        return cast(mx.array, self._library.swiglu(gate, x))

    def quantize(
        self,
        w: mx.array,
        group_size: int | None = None,
        bits: int | None = None,
        *modes: str,
        **rest: Any,
    ) -> tuple[mx.array, ...]:
        plain = not (modes or rest or _paused)
        native = bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128) and plain
        fits = (
            w.dtype == mx.float32 and w.ndim > 1 and w.size and w.shape[-1] % (group_size or 1) == 0
        )
        if not (native and fits):
            return cast("tuple[mx.array, ...]", _quantize(w, group_size, bits, *modes, **rest))
        return cast("tuple[mx.array, ...]", self._library.quantize(w, group_size, bits))


def rotation_rates(
    dims: int, base: float | None, freqs: mx.array | None, size: int
) -> mx.array | None:
    """Return radians per position of each pair, ``[dims / 2]``; None for invalid arguments."""
    if not 0 < dims <= size or dims % 2 or (base is None) == (freqs is None):
        return None
    if freqs is None:
        return _frequencies(dims, float(base or 0))
    if freqs.shape != (dims // 2,):
        return None
    return mx.reciprocal(freqs.astype(mx.float32))


def _positions(offset: Any, batch: int) -> mx.array | None:
    """Return positions as int32 ``[1]`` or ``[batch]``; None if the offset has another form."""
    if not isinstance(offset, mx.array):
        return mx.array([int(offset)], mx.int32)
    if not mx.issubdtype(offset.dtype, mx.integer) or offset.shape not in {(), (1,), (batch,)}:
        return None
    return offset.astype(mx.int32).reshape(-1)


@cache
def _frequencies(dims: int, base: float) -> mx.array:
    """Return the radians per position that MLX uses, equal to the bit."""
    half = dims // 2
    found = mx.exp(mx.arange(0, -half, -1, mx.float32) * (math.log(base) / half))
    mx.eval(found)
    return found


def install(library: ModuleType) -> None:
    """Replace MLX's functions; call before model modules are imported, once per process."""
    functions = _Functions(library)
    _use(functions.rms_norm, functions.rope, functions.swiglu, functions.quantize)


@contextmanager
def installed(library: ModuleType | None) -> Iterator[None]:
    """Use the library's operations, or MLX's own for None; then restore those in use before."""
    before = mx.fast.rms_norm, mx.fast.rope, activations.swiglu, mx.quantize
    try:
        _use(_rms_norm, _rope, _swiglu, _quantize)
        if library is not None:
            install(library)
        yield
    finally:
        _use(*before)


@contextmanager
def paused() -> Iterator[None]:
    """Compute with MLX's own functions, which have gradients, also where models imported ours."""
    global _paused  # noqa: PLW0603 - model modules hold the functions themselves
    _paused = True
    try:
        yield
    finally:
        _paused = False


def _use(rms_norm: Any, rope: Any, swiglu: Any, quantize: Any) -> None:
    mx.fast.rms_norm = rms_norm
    mx.fast.rope = rope
    activations.swiglu = swiglu
    mx.quantize = quantize
