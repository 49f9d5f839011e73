"""Whole decoder layers as operations of the library.

A layer's own code is about twenty operations. Each costs MLX 4 µs, and the host builds all of them.
A decode step of a layer is one operation. In a packed prefill, a layer is one operation before and
one after the attention of its chunks. Threads share each part without a wait in between. Every part
computes as the operation of its own does, so numbers are the same to the bit.

A layer that is divided among the ranks of a gang has two sums over all ranks, each of which ends an
operation::

    decode_layer    norm; queries, keys, values; RoPE; attention; product
    all_sum         plus the bias and the layer's input
    layer_mlp       norm; gated MLP
    all_sum         plus the bias and the MLP's input

A packed prefill runs ``layer_inputs``, attention and ``layer_output`` in place of ``decode_layer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx import nn

from kvd.worker import decoder_layers
from kvd.worker.attention.packed import packed_attention
from kvd.worker.cache.backend import pools_of
from kvd.worker.cache.batch import BatchQuantizedKVCache
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.steps import DecodeStep, PackedPrefill
from kvd.worker.decoder_layers import Parts
from kvd.worker.native.layers import PackedLinear, PackedPart
from kvd.worker.native.operations import rotation_rates
from kvd.worker.native.step import NativeStep

Weights = tuple[list[Any], ...]
"""Linear layers and norms as the library's arguments: packed weights and their numbers of outputs,
biases and norms or None, and the norms' epsilons."""


@dataclass(frozen=True, eq=False)
class WholeLayer:
    """One layer's weights and settings."""

    library: ModuleType
    linears: tuple[PackedLinear, ...]
    """Queries, keys, values, output, gate, up, down."""
    norms: tuple[nn.RMSNorm | None, ...]
    """Norms of the layer's input, queries, keys and the MLP's input. Queries and keys may have
    none."""
    heads: int
    scale: float
    rotation: tuple[mx.array, bool, float]
    """Radians per position of each pair, whether pairs are neighbours, and a factor of positions.
    """

    def compute(self, x: mx.array, cache: BatchQuantizedKVCache) -> mx.array | None:
        if x.dtype != mx.float32 or x.ndim != 3 or x.shape[1] != 1:
            return None
        step = cache.step
        if isinstance(step, DecodeStep) and isinstance(step.backend, NativeStep):
            return self._decode(x, cache.layer, step, step.backend)
        if isinstance(step, PackedPrefill):
            return self._prefill(x, cache, step)
        return None

    def _decode(
        self, x: mx.array, layer: LayerStore, step: DecodeStep, native: NativeStep
    ) -> mx.array:
        output, layer.tail_keys, layer.tail_values = self.library.decode_layer(
            x,
            native.pages.array,
            layer.tail_keys,
            layer.tail_values,
            native.rows,
            *pools_of(layer, native.pages),
            self.scale,
            native.kind.keep,
            step.offsets,
            *self.rotation,
            self.heads,
            *self._weights,
        )
        found: mx.array = output
        return found

    def _prefill(self, x: mx.array, cache: BatchQuantizedKVCache, step: PackedPrefill) -> mx.array:
        geometry = cache.layer.geometry
        sizes = (self.heads, geometry.kv_heads, geometry.k_dim, geometry.v_dim)
        layer = (step.positions, sizes, *self.rotation, *self._weights)
        # Heads first, as attention and pages read them: views give them the shape of a decode step.
        queries, keys, values = (
            side[None].swapaxes(0, 2) for side in self.library.layer_inputs(x, *layer)
        )
        handle, _ = cache.update_and_fetch(keys, values)
        attended = packed_attention(queries, handle, self.scale)
        found: mx.array = self.library.layer_output(x, attended.swapaxes(0, 2), *layer)
        return found

    @cached_property
    def _weights(self) -> Weights:
        """The arguments for the operations with attention."""
        return weights_of(self.linears, self.norms)


@dataclass(frozen=True, eq=False)
class DividedLayer(WholeLayer):
    """One rank's part of a layer."""

    out: PackedPart
    down: PackedPart

    def compute(self, x: mx.array, cache: BatchQuantizedKVCache) -> mx.array | None:
        """See `decoder_layers.Block.compute`; the output is the same on all ranks."""
        product = super().compute(x, cache)
        if product is None:
            return None
        h = x + self.out.total(product)
        return h + self.down.total(self.library.layer_mlp(h, *self._mlp))

    @cached_property
    def _weights(self) -> Weights:
        return weights_of(self.linears[:4], self.norms[:3])

    @cached_property
    def _mlp(self) -> Weights:
        return weights_of(self.linears[4:], self.norms[3:])


def weights_of(linears: tuple[PackedLinear, ...], norms: tuple[nn.RMSNorm | None, ...]) -> Weights:
    return (
        [linear.packed for linear in linears],
        [linear.outputs for linear in linears],
        [linear.product_bias for linear in linears],
        [None if norm is None else norm.weight for norm in norms],
        [0.0 if norm is None else float(norm.eps) for norm in norms],
    )


def fuse(model: Any, library: ModuleType) -> int:
    """Make a model's layers run as the library's operations; return how many are changed.

    Weights must have been packed (`kvd.worker.native.layers`).
    """
    return decoder_layers.fuse(model, lambda parts: _whole(parts, library))


def obstacle(model: Any, library: ModuleType) -> str:
    """Return why a layer cannot run so; empty if all can."""
    return decoder_layers.obstacle(model, lambda parts: _whole(parts, library))


def _whole(parts: Parts, library: ModuleType) -> WholeLayer | str:
    """Return a layer as one operation, or why it cannot be one."""
    linears = [
        *(parts.attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(parts.mlp[name] for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    out, down = linears[3], linears[6]
    divided = type(out) is type(down) is PackedPart
    for place, linear in enumerate(linears):
        if type(linear) is not (PackedPart if divided and place in (3, 6) else PackedLinear):
            return f"a product is {type(linear).__name__} instead of a packed dense one"
    heads = parts.heads(linears[0].outputs, linears[1].outputs)
    if heads is None or linears[2].outputs % heads[1] or linears[4].outputs != linears[5].outputs:
        return "its heads or its MLP have other sizes than its products"
    k_dim = linears[0].outputs // heads[0]
    rotation = _rotation(parts.attention["rope"], k_dim)
    if rotation is None:
        return f"there is no operation for {type(parts.attention['rope']).__name__}"
    norms = (parts.before, *(parts.head_norms or (None, None)), parts.after)
    settings = library, tuple(linears), norms, heads[0], parts.scale, rotation
    return DividedLayer(*settings, out, down) if divided else WholeLayer(*settings)


def _rotation(rope: Any, size: int) -> tuple[mx.array, bool, float] | None:
    """Return `WholeLayer.rotation`; None for other kinds of RoPE."""
    if type(rope) is nn.RoPE:
        rates, factor = rotation_rates(rope.dims, rope.base, None, size), float(rope.scale)
    elif type(rope).__name__ == "Llama3RoPE":
        rates, factor = rotation_rates(rope.dims, None, rope._freqs, size), 1.0  # noqa: SLF001
    else:
        return None
    return None if rates is None else (rates, bool(rope.traditional), factor)
