"""Decode steps of whole decoder layers, in seven kernels instead of about twenty operations.

On a GPU, a step of a small model takes as long as the host needs to launch it, and each operation
costs the host 2 to 8 µs. A common layer has these parts: norm; joined queries, keys and values;
norms of heads and RoPE; attention; residual; norm; gated MLP; residual. If the step attends with
kernels (`kvd.worker.attention.fused`), the layer becomes ::

    product      of normed inputs: queries, keys, values                      `products`
    rotate       norms of heads, RoPE, keys and values into tails             `kernels.rotate`
    attention    two kernels                                                  `kernels.decode`
    product      plus the layer's input                                       `products`
    product      of normed inputs, gated                                      `products`
    product      plus the MLP's input                                         `products`

A layer is recognized by its submodules. Whether its own code computes in this order, too, is left
to the probe: it compares the model's logits with those over mlx-lm's caches, with which layers run
their own code. In prefill, layers run their own code as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from kvd.worker.attention.fused import FusedStep, RotarySettings
from kvd.worker.attention.kernels.arguments import Rotation
from kvd.worker.cache.batch import BatchQuantizedKVCache
from kvd.worker.cache.steps import DecodeStep
from kvd.worker.gpu import products
from kvd.worker.gpu.joined_linear import JoinedLinear

_LAYER = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "rope"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})


@dataclass(frozen=True, eq=False)
class Block:
    """One layer's weights and settings."""

    before: products.Norm
    qkv: mx.array
    """``[outputs of all three, inputs]``: joined weights of queries, keys and values."""
    bias: mx.array | None
    rotary: RotarySettings
    scale: float
    out: mx.array
    out_bias: mx.array | None
    after: products.Norm
    gate_up: mx.array
    down: mx.array

    def decode(self, x: mx.array, cache: BatchQuantizedKVCache) -> mx.array | None:
        """Return the layer's output for one token of each row, ``[batch, 1, dim]``; lazy.

        Returns None if blocks do not fit this step; the layer's own code runs then.
        """
        step = cache.step
        if not isinstance(step, DecodeStep) or not isinstance(step.backend, FusedStep):
            return None
        if not products.fits(x, [products.OUTPUTS]) or x.dtype != self.qkv.dtype:
            return None
        fused, layer = step.backend, cache.layer
        (qkv,) = products.multiply(
            x, self.qkv, self.qkv.shape[:1], norm=self.before, bias=self.bias
        )
        queries = fused.rotate(layer, step, qkv, self.rotary)
        attended = fused.attend(queries, layer, self.scale, None)
        (h,) = products.multiply(
            attended, self.out, self.out.shape[:1], bias=self.out_bias, residual=x
        )
        gated = products.multiply_gated(h, self.gate_up, self.after)
        (output,) = products.multiply(gated, self.down, self.down.shape[:1], residual=h)
        return output


def fuse(model: Any) -> int:
    """Make a model's layers run decode steps as blocks; return the number of changed layers.

    Weights must have been joined (`kvd.worker.gpu.joined_linear`) with kvd's own products.
    """
    count = 0
    for layer in list(model.modules()):
        if (block := _block_of(layer)) is not None:
            kind = type(layer)
            layer.__class__ = _fused(kind)
            layer.block = block
            count += 1
    return count


def unfuse(model: Any) -> None:
    """Give the layers their own code back."""
    for layer in list(model.modules()):
        if "block" in vars(layer) and isinstance(layer.block, Block):
            layer.__class__ = type(layer).__mro__[1]
            del layer.block


def _fused(kind: type) -> type:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **rest: Any) -> mx.array:
        if mask is None and not rest and type(cache) is BatchQuantizedKVCache:
            found: mx.array | None = self.block.decode(x, cache)
            if found is not None:
                return found
        plain: mx.array = kind.__call__(self, x, mask, cache, **rest)
        return plain

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _block_of(layer: Any) -> Block | None:
    if not _has(layer, _LAYER) or "block" in vars(layer):
        return None
    attention, mlp = layer["self_attn"], layer["mlp"]
    if not _has(attention, _ATTENTION, _HEAD_NORMS) or not _has(mlp, _MLP):
        return None
    before, after = _norm(layer["input_layernorm"]), _norm(layer["post_attention_layernorm"])
    qkv = _joined(attention, "q_proj", "k_proj", "v_proj")
    out = _joined(attention, "o_proj")
    gate_up, down = _joined(mlp, "gate_proj", "up_proj"), _joined(mlp, "down_proj")
    if before is None or after is None or None in (qkv, out, gate_up, down):
        return None
    rotary, scale = _rotary_settings(attention, qkv.sizes), getattr(attention, "scale", None)
    if rotary is None or not isinstance(scale, float):
        return None
    if gate_up.bias is not None or down.bias is not None:
        return None
    return Block(
        before, qkv.stored, qkv.bias, rotary, scale, out.stored, out.bias, after,
        gate_up.stored, down.stored,
    )  # fmt: skip


def _has(module: Any, names: frozenset[str], optional: frozenset[str] = frozenset()) -> bool:
    """Return whether a module has exactly these submodules and no arrays.

    It may also have the optional submodules, all or none of them.
    """
    if not isinstance(module, nn.Module):
        return False
    children = frozenset(module.children())
    arrays = any(isinstance(value, mx.array) for value in module.values())
    return not arrays and children in {names, names | optional}


def _norm(module: Any) -> products.Norm | None:
    if type(module) is not nn.RMSNorm:
        return None
    return products.Norm(module.weight, float(module.eps))


def _joined(parent: Any, *names: str) -> Any:
    """Return the joined weights of exactly these layers; None if not joined or not of fit sizes."""
    parts = [parent[name] for name in names]
    if not all(type(part) is JoinedLinear for part in parts):
        return None
    joined = parts[0].joined
    if any(part.joined is not joined for part in parts) or len(joined.sizes) != len(parts):
        return None
    odd = any(size % products.OUTPUTS for size in joined.sizes)
    return None if odd or joined.stored.shape[1] % products.INPUTS else joined


def _rotary_settings(attention: Any, sizes: list[int]) -> RotarySettings | None:
    """Return a layer's norms and RoPE; None if the `rotate` kernel does not compute such ones."""
    heads, kv_heads = getattr(attention, "n_heads", 0), getattr(attention, "n_kv_heads", 0)
    found = _frequencies(attention["rope"])
    if found is None or not heads or not kv_heads or sizes[0] % heads:
        return None
    dims, traditional, frequencies = found
    k_dim = sizes[0] // heads
    if sizes[1] != kv_heads * k_dim or dims > k_dim:
        return None
    if "q_norm" not in attention:
        return RotarySettings(Rotation(dims, traditional), heads, frequencies, None)
    query, key = _norm(attention["q_norm"]), _norm(attention["k_norm"])
    if query is None or key is None or query.eps != key.eps:
        return None
    if not query.weight.shape == key.weight.shape == (k_dim,):
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
