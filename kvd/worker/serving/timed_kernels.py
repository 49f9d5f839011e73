"""Kernels under check: which variants a model requests, and how long compiling them takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from kvd.worker.attention.fused import Kernels
from kvd.worker.attention.kernels.arguments import (
    Append,
    Attend,
    Attention,
    Heads,
    Pack,
    PassTokens,
    PutTails,
    Rotate,
    Spread,
    Tiling,
    Unpack,
)
from kvd.worker.serving.selfcheck import SelfCheckFailed

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class KernelVariant:
    """What the text of an attention kernel depends on."""

    dtype: mx.Dtype
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    keys: tuple[tuple[int, int, bool], ...]
    values: tuple[tuple[int, int, bool], ...]
    scale: float
    keep: int
    sinks: mx.Dtype | None


class TimedKernels:
    """Calls each kernel variant twice before its first use, to measure how long compiling takes.

    Raises `SelfCheckFailed` if a kernel fails.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.compiled: dict[KernelVariant, float] = {}
        """Seconds by which the first call exceeded the second."""
        self._appends: dict[tuple[object, ...], float] = {}

    @property
    def launches(self) -> int:
        return self._kernels.launches

    @launches.setter
    def launches(self, count: int) -> None:
        self._kernels.launches = count

    @property
    def compile_s(self) -> float:
        return sum(self.compiled.values()) + sum(self._appends.values())

    def decode_attention(self, given: Attention) -> mx.array:
        variant = KernelVariant(
            given.queries.dtype,
            given.queries.shape[1],
            given.tail_keys.shape[1],
            given.tail_keys.shape[3],
            given.tail_values.shape[3],
            tuple(given.key_packings),
            tuple(given.value_packings),
            given.scale,
            given.keep,
            None if given.sinks is None else given.sinks.dtype,
        )
        arrays = [given.queries, given.tail_keys, given.tail_values]
        return self._called(self._kernels.decode_attention, given, self.compiled, variant, arrays)

    def append(self, given: Append) -> tuple[mx.array, mx.array]:
        tails = given.tail_keys, given.tail_values
        shapes = (tuple(tail.shape[1:]) for tail in tails)
        variant = given.tail_keys.dtype, *shapes, given.token_rows is None
        arrays = [*tails, given.keys, given.values]
        return self._called(self._kernels.append, given, self._appends, variant, arrays)

    def rotate(self, given: Rotate) -> tuple[mx.array, mx.array, mx.array]:
        tails = given.tail_keys, given.tail_values
        shapes = (tuple(tail.shape[1:]) for tail in tails)
        layer = given.rotation, given.q_heads, given.tail_keys.dtype
        variant = *layer, *shapes, given.token_rows is None
        arrays = [*tails, given.qkv]
        return self._called(self._kernels.rotate, given, self._appends, variant, arrays)

    def spread(self, given: Spread) -> tuple[mx.array, mx.array, mx.array]:
        heads = given.q_heads, given.kv_heads, given.dims
        variant = "spread", given.rotation, *heads, given.qkv.dtype
        return self._called(self._kernels.spread, given, self._appends, variant, [given.qkv])

    def pack(self, given: Pack) -> list[mx.array]:
        variant = "pack", *map(tuple, given.packings), *_shapes(given.tokens)
        return self._called(
            self._kernels.pack, given, self._appends, variant, _arrays(given.tokens)
        )

    def unpack(self, given: Unpack) -> mx.array:
        packings = tuple(given.key_packings), tuple(given.value_packings)
        variant = "unpack", *packings, *_shapes(given.tokens)
        arrays = [*_arrays(given.tokens), *given.pools, given.dense_keys, given.dense_values]
        return self._called(self._kernels.unpack, given, self._appends, variant, arrays)

    def tiling(self, given: Heads) -> Tiling | None:
        return self._kernels.tiling(given)

    def attend(self, given: Attend) -> mx.array:
        shapes = (tuple(one.shape[1:]) for one in (given.queries, given.keys, given.values))
        variant = "attend", *shapes, given.queries.dtype, given.scale, given.warpgroups
        arrays = [given.queries, given.keys, given.values, given.ready]
        return self._called(self._kernels.attend, given, self._appends, variant, arrays)

    def put_tails(self, given: PutTails) -> tuple[mx.array, mx.array]:
        tails = given.tail_keys, given.tail_values
        variant = "tails", *(tuple(tail.shape[1:]) for tail in tails), given.tail_keys.dtype
        arrays = [*tails, given.kept_keys, given.kept_values]
        return self._called(self._kernels.put_tails, given, self._appends, variant, arrays)

    def _called(
        self,
        kernel: Callable[[_Given], _Found],
        given: _Given,
        compiled: dict[Any, float],
        variant: object,
        arrays: list[mx.array],
    ) -> _Found:
        """Call a kernel. If its variant is new, first call it twice to time its compilation."""
        before = self.launches
        try:
            if variant not in compiled:
                mx.eval(arrays)
                first, second = (_seconds(partial(kernel, given)) for _ in range(2))
                compiled[variant] = max(0.0, first - second)
            found = kernel(given)
        except MemoryError:
            raise
        except Exception as failed:  # compilers and drivers raise any type
            raise SelfCheckFailed(first_line(failed)) from failed
        if self.launches <= before:
            raise SelfCheckFailed("no kernel was launched")
        return found


def _arrays(tokens: PassTokens) -> list[mx.array]:
    return [tokens.keys, tokens.values, tokens.tail_keys, tokens.tail_values]


def _shapes(tokens: PassTokens) -> tuple[object, ...]:
    return *(tuple(one.shape[1:]) for one in _arrays(tokens)), tokens.keys.dtype


def first_line(error: Exception) -> str:
    """Return an error's type and its first line, without any log after it."""
    line = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {line}".removesuffix(": ")


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - start
