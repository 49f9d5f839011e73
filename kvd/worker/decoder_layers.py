"""Recognizes common decoder layers, so that a forward pass runs each as one block.

A common layer has these parts: norm; queries, keys and values; norms of heads and RoPE; attention;
residual; norm; gated MLP; residual. A layer is recognized by its submodules. Whether its own code
computes in this order, too, is left to the probe: it compares the model's logits with those over
mlx-lm's caches, with which layers run their own code. Blocks refuse passes that they do not
compute, and the layer's own code runs then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from kvd.worker.cache.batch import BatchQuantizedKVCache

_LAYER = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "rope"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_ARGUMENTS = ["self", "x", "mask", "cache"]
"""Arguments of a common layer. Others may matter only to long prompts, which the probe lacks."""


class Block(Protocol):
    """A layer's weights and settings, and its forward passes."""

    def compute(self, x: mx.array, cache: BatchQuantizedKVCache) -> mx.array | None:
        """Return the layer's output for a decode step or a packed prefill; lazy.

        ``x`` and the output are ``[batch, 1, dim]``. Returns None if blocks do not fit this pass;
        the layer's own code runs then.
        """


@dataclass(frozen=True)
class Parts:
    """The submodules of a common decoder layer."""

    attention: Any
    mlp: Any
    before: nn.RMSNorm
    after: nn.RMSNorm
    scale: float

    @property
    def head_norms(self) -> tuple[nn.RMSNorm, nn.RMSNorm] | None:
        """Norms of queries and keys, in that order; None if the layer has none."""
        if "q_norm" not in self.attention:
            return None
        return self.attention["q_norm"], self.attention["k_norm"]

    def heads(self, q_outputs: int, k_outputs: int) -> tuple[int, int] | None:
        """Return the numbers of query heads and of KV heads; None if outputs do not fit them."""
        heads = getattr(self.attention, "n_heads", 0)
        kv_heads = getattr(self.attention, "n_kv_heads", 0)
        if not heads or not kv_heads or q_outputs % heads:
            return None
        return (heads, kv_heads) if k_outputs == kv_heads * (q_outputs // heads) else None


BlockOf = Callable[[Parts], Block | str]
"""Returns a layer's block, or the reason why there is none for such parts."""


def fuse(model: Any, block_of: BlockOf) -> int:
    """Make a model's layers run as blocks; return the number of changed layers."""
    count = 0
    for layer in list(model.modules()):
        parts = _parts_of(layer)
        block = parts if isinstance(parts, str) else block_of(parts)
        if not isinstance(block, str):
            kind = type(layer)
            layer.__class__ = _fused(kind)
            layer.block = block
            count += 1
    return count


def obstacle(model: Any, block_of: BlockOf) -> str:
    """Return why the first layer that runs its own code has no block; empty if all have one."""
    for layer in model.layers:
        if "block" not in vars(layer):
            parts = _parts_of(layer)
            found = parts if isinstance(parts, str) else block_of(parts)
            if isinstance(found, str):
                return found
    return ""


def unfuse(model: Any) -> None:
    """Give the layers their own code back."""
    for layer in list(model.modules()):
        if isinstance(layer, nn.Module) and "block" in vars(layer):
            layer.__class__ = type(layer).__mro__[1]
            del layer.block


def _fused(kind: type) -> type:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **rest: Any) -> mx.array:
        if mask is None and not rest and type(cache) is BatchQuantizedKVCache:
            found: mx.array | None = self.block.compute(x, cache)
            if found is not None:
                return found
        plain: mx.array = kind.__call__(self, x, mask, cache, **rest)
        return plain

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _parts_of(layer: Any) -> Parts | str:
    """Return a layer's parts, or how it differs from a common decoder layer."""
    name = type(layer).__name__
    if not _has(layer, _LAYER) or "block" in vars(layer):
        return f"{name} has other parts than {_listed(_LAYER)}"
    if list(inspect.signature(type(layer).__call__).parameters) != _ARGUMENTS:
        return f"{name} takes other arguments than {', '.join(_ARGUMENTS[1:])}"
    attention, mlp = layer["self_attn"], layer["mlp"]
    before, after = layer["input_layernorm"], layer["post_attention_layernorm"]
    if difference := _difference(attention, mlp, [before, after]):
        return difference
    return Parts(attention, mlp, before, after, attention.scale)


def _difference(attention: Any, mlp: Any, norms: list[Any]) -> str:
    """Return how attention, MLP or a norm differs from a common one; empty if none does."""
    if not _has(attention, _ATTENTION, _HEAD_NORMS):
        return f"{type(attention).__name__} has other parts than {_listed(_ATTENTION)}"
    if not _has(mlp, _MLP):
        return f"{type(mlp).__name__} has other parts than {_listed(_MLP)}"
    norms = norms + [attention[name] for name in _HEAD_NORMS if name in attention]
    others = [type(norm).__name__ for norm in norms if type(norm) is not nn.RMSNorm]
    if others:
        return f"a norm is {others[0]} instead of RMSNorm"
    if not isinstance(getattr(attention, "scale", None), float):
        return f"{type(attention).__name__} has no scale"
    return ""


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _has(module: Any, names: frozenset[str], optional: frozenset[str] = frozenset()) -> bool:
    """Return whether a module has exactly these submodules and no arrays.

    It may also have the optional submodules, all or none of them.
    """
    if not isinstance(module, nn.Module):
        return False
    children = frozenset(module.children())
    arrays = any(isinstance(value, mx.array) for value in module.values())
    return not arrays and children in {names, names | optional}
