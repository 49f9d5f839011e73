"""Whole decoder layers in few kernels: decode steps and packed prefills.

On a GPU, a step of a small model takes as long as the host needs to launch it. Each operation costs
the host 2 to 8 µs in a decode step, and about 20 µs in a prefill pass. A common layer has these
parts: norm; joined queries, keys and values; norms of heads and RoPE; attention; residual; norm;
gated MLP; residual. If the step attends with kernels (`kvd.worker.attention.fused`), the layer
becomes ::

    product      of normed inputs: queries, keys, values                      `products`
    rotate       norms of heads, RoPE, keys and values into tails             `kernels.rotate`
    attention    two kernels                                                  `kernels.decode`
    product      plus the layer's input                                       `products`
    product      of normed inputs, gated                                      `products`
    product      plus the MLP's input                                         `products`

In a packed prefill, MLX multiplies, and `kvd.worker.attention.fused_prefill` is between the two
products of the attention: about fifteen kernels instead of 60 to 75.

In a layer that is divided among the ranks of a gang, the last product of the attention and that of
the MLP are terms of sums over all ranks, which MLX computes and adds to the layer's input.

`kvd.worker.decoder_layers` recognizes such layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.activations import swiglu

from kvd.worker import decoder_layers
from kvd.worker.attention.fused import FusedStep, RotarySettings
from kvd.worker.attention.fused_prefill import FusedPass
from kvd.worker.attention.kernels.arguments import Rotation
from kvd.worker.cache.batch import BatchQuantizedKVCache
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.steps import DecodeStep
from kvd.worker.decoder_layers import Parts
from kvd.worker.gpu import products
from kvd.worker.gpu.joined_linear import JoinedLinear, JoinedPart
from kvd.worker.lean_imports import np


@dataclass(frozen=True, eq=False)
class Output:
    """A product that is added to the layer's input."""

    weight: mx.array
    """``[outputs, inputs]``."""
    bias: mx.array | None

    def added(self, x: mx.array, inputs: mx.array) -> mx.array:
        """Return ``x`` plus the product of ``inputs``, ``[batch, 1, outputs]``; lazy."""
        (found,) = products.multiply(
            inputs, self.weight, self.weight.shape[:1], bias=self.bias, residual=x
        )
        return found

    def added_to_tokens(self, x: mx.array, inputs: mx.array) -> mx.array:
        """Do so for the tokens of a pass, ``[batch, outputs]`` and ``[batch, inputs]``; lazy."""
        found = mx.addmm(x, inputs, self.weight.T)
        return found if self.bias is None else found + self.bias


@dataclass(frozen=True, eq=False)
class DividedOutput(Output):
    """An output whose product is a term of a sum over all ranks."""

    part: JoinedPart

    def added_to_tokens(self, x: mx.array, inputs: mx.array) -> mx.array:
        return x + self.part.total(inputs @ self.weight.T)

    def added(self, x: mx.array, inputs: mx.array) -> mx.array:
        (product,) = products.multiply(inputs, self.weight, self.weight.shape[:1])
        return x + self.part.total(product)


@dataclass(frozen=True, eq=False)
class Block:
    """One layer's weights and settings."""

    before: products.Norm
    qkv: mx.array
    """``[outputs of all three, inputs]``: joined weights of queries, keys and values."""
    bias: mx.array | None
    rotary: RotarySettings
    scale: float
    out: Output
    after: products.Norm
    gate_up: mx.array
    down: Output

    def compute(self, x: mx.array, cache: BatchQuantizedKVCache) -> mx.array | None:
        """See `decoder_layers.Block.compute`."""
        if x.ndim != 3 or x.shape[1] != 1 or x.dtype != self.qkv.dtype:
            return None
        if isinstance(cache.step, DecodeStep):
            return self._decode(x, cache.layer, cache.step)
        fused = FusedPass.of(cache, x.dtype, self.rotary.q_heads, self.scale)
        return None if fused is None else self._prefill(x, cache, fused)

    def _decode(self, x: mx.array, layer: LayerStore, step: DecodeStep) -> mx.array | None:
        fused = step.backend
        if not isinstance(fused, FusedStep) or not products.fits(x, [products.OUTPUTS]):
            return None
        (qkv,) = products.multiply(
            x, self.qkv, self.qkv.shape[:1], norm=self.before, bias=self.bias
        )
        queries = fused.rotate(layer, step, qkv, self.rotary)
        attended = fused.attend(queries, layer, self.scale, None)
        h = self.out.added(x, attended)
        return self.down.added(h, products.multiply_gated(h, self.gate_up, self.after))

    def _prefill(self, x: mx.array, cache: BatchQuantizedKVCache, fused: FusedPass) -> mx.array:
        tokens = x.flatten(0, 1)
        qkv = self.before.of(tokens) @ self.qkv.T
        if self.bias is not None:
            qkv = qkv + self.bias
        attended = fused.attend(cache, qkv, self.rotary)
        h = self.out.added_to_tokens(tokens, attended)
        gate, up = mx.split(self.after.of(h) @ self.gate_up.T, 2, axis=-1)
        found = self.down.added_to_tokens(h, swiglu(gate, up))
        return found[:, None]


def fuse(model: Any) -> int:
    """Make a model's layers run as blocks; return the number of changed layers.

    Weights must have been joined (`kvd.worker.gpu.joined_linear`) with kvd's own products.
    `decoder_layers.unfuse` gives the layers their own code back.
    """
    return decoder_layers.fuse(model, _block_of)


def obstacle(model: Any) -> str:
    """Return why a layer cannot be a block; empty if all can."""
    return decoder_layers.obstacle(model, _block_of)


def _block_of(parts: Parts) -> Block | str:
    """Return a layer's block, or why there is none."""
    attention, mlp = parts.attention, parts.mlp
    qkv = _joined(attention, "q_proj", "k_proj", "v_proj")
    out, down = _output(attention, "o_proj"), _output(mlp, "down_proj")
    gate_up = _joined(mlp, "gate_proj", "up_proj")
    if qkv is None or out is None or gate_up is None or down is None:
        return "its products are not joined dense ones, or have other sizes than the kernels"
    rotary = _rotary_settings(parts, qkv.sizes)
    if rotary is None:
        return f"there is no kernel for its {type(attention['rope']).__name__} or its head norms"
    if gate_up.bias is not None:
        return "its MLP has biases"
    return Block(
        _norm(parts.before), qkv.stored, qkv.bias, rotary, parts.scale, out,
        _norm(parts.after), gate_up.stored, down,
    )  # fmt: skip


def _norm(module: nn.RMSNorm) -> products.Norm:
    return products.Norm(module.weight, float(module.eps))


def _output(parent: Any, name: str) -> Output | None:
    """Return a layer of joined weights as an output; None if `_joined` returns None."""
    part = parent[name]
    joined = _joined(parent, name, kind=type(part))
    if joined is None:
        return None
    if isinstance(part, JoinedPart):
        return DividedOutput(joined.stored, None, part)
    return Output(joined.stored, joined.bias)


def _joined(parent: Any, *names: str, kind: type = JoinedLinear) -> Any:
    """Return the joined weights of exactly these layers; None if not joined or not of fit sizes."""
    parts = [parent[name] for name in names]
    if not issubclass(kind, JoinedLinear) or any(type(part) is not kind for part in parts):
        return None
    joined = parts[0].joined
    if any(part.joined is not joined for part in parts) or len(joined.sizes) != len(parts):
        return None
    odd = any(size % products.OUTPUTS for size in joined.sizes)
    return None if odd or joined.stored.shape[1] % products.INPUTS else joined


def _rotary_settings(parts: Parts, sizes: list[int]) -> RotarySettings | None:
    """Return a layer's norms and RoPE; None if the `rotate` kernel does not compute such ones."""
    found, counts = _frequencies(parts.attention["rope"]), parts.heads(*sizes[:2])
    if found is None or counts is None:
        return None
    dims, traditional, frequencies = found
    heads, k_dim = counts[0], sizes[0] // counts[0]
    if dims > k_dim:
        return None
    if parts.head_norms is None:
        return RotarySettings(Rotation(dims, traditional), heads, frequencies, None)
    query, key = map(_norm, parts.head_norms)
    if query.eps != key.eps or not query.weight.shape == key.weight.shape == (k_dim,):
        return None
    rotation = Rotation(dims, traditional, normed=True, eps=query.eps)
    return RotarySettings(rotation, heads, frequencies, (query.weight, key.weight))


def _frequencies(rope: Any) -> tuple[int, bool, mx.array] | None:
    """Return `Rotation.dims`, `Rotation.traditional`, and radians per position ``[dims / 2]``.

    Returns None for kinds of RoPE that the kernel does not compute.
    """
    if type(rope) is nn.RoPE:
        half = rope.dims // 2
        each = rope.scale * np.power(float(rope.base), -np.arange(half) / half)
        return rope.dims, bool(rope.traditional), mx.array(each.astype(np.float32))
    if type(rope).__name__ == "Llama3RoPE":
        return rope.dims, bool(rope.traditional), 1 / rope._freqs.astype(mx.float32)  # noqa: SLF001
    return None
