"""Linear layers and embeddings over weights in the library's own order.

A weight ``[outputs, inputs]`` is stored in panels of 16 outputs, ``[panels, inputs, 16]``, in the
checkpoint's dtype. Half floats take half the memory and bandwidth of float32, and are widened
exactly during the product. Many float32 checkpoints were converted from half floats. So a float32
weight is stored as half floats if none of its elements changes.

Each output is summed over the inputs in their order, so a row's numbers are the same to the bit in
any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
from mlx import nn

PANEL = 16
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_CHECKED_BYTES = 16 * 2**20
"""Bytes of a weight that are compared at once."""
_UNPACKED_BYTES = 4 * 2**20
"""Bytes of a weight that a gradient unpacks at once."""


class _Packed(nn.Module):  # type: ignore[misc]
    """A weight in panels.

    The name ``_panels`` begins with an underscore, so that MLX does not take the array for a
    parameter and convert its dtype.
    """

    def __init__(self, library: ModuleType, layer: nn.Module) -> None:
        super().__init__()
        self._library: Any = library
        weight = _narrowed(layer.weight)
        self.outputs, inputs = weight.shape
        panels = -(-self.outputs // PANEL)
        if missing := panels * PANEL - self.outputs:
            weight = mx.pad(weight, [(0, missing), (0, 0)])
        self._panels = mx.contiguous(weight.reshape(panels, PANEL, inputs).swapaxes(1, 2))
        if layer.weight.dtype == mx.float32:  # it was read to be checked: keep one copy only
            mx.eval(self._panels)

    @property
    def packed(self) -> mx.array:
        return self._panels

    @property
    def weight(self) -> mx.array:
        """``[outputs, inputs]`` float32, created on each access; for models that read it."""
        panels, inputs, _ = self.packed.shape
        unpacked = self.packed.swapaxes(1, 2).reshape(panels * PANEL, inputs)
        return unpacked[: self.outputs].astype(mx.float32)

    def _product(self, x: mx.array, bias: mx.array | None) -> mx.array:
        return cast(mx.array, self._library.multiply(x, self.packed, self.outputs, bias))


def _narrowed(weight: mx.array) -> mx.array:
    """Return a float32 weight as half floats if that is exact; evaluates."""
    if weight.dtype == mx.float32:
        rows = max(1, _CHECKED_BYTES // max(1, weight.nbytes // len(weight)))
        for half in _DTYPES[1:]:
            parts = (weight[at : at + rows] for at in range(0, len(weight), rows))
            if all(_is_exact(part, half) for part in parts):
                return weight.astype(half)
    return weight


def _is_exact(weight: mx.array, half: mx.Dtype) -> bool:
    return bool(mx.array_equal(weight.astype(half).astype(mx.float32), weight).item())


class _WithGradient:
    """The library's product, with a gradient with respect to its input."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self.look_up = library.look_up

    def multiply(
        self, x: mx.array, packed: mx.array, outputs: int, bias: mx.array | None
    ) -> mx.array:
        @mx.custom_function
        def product(x: mx.array) -> mx.array:
            return cast(mx.array, self._library.multiply(x, packed, outputs, bias))

        @product.vjp
        def gradient(_x: mx.array, cotangent: mx.array, _output: mx.array) -> mx.array:
            return _times_weight(cotangent, packed)

        return cast(mx.array, product(x))


def _times_weight(y: mx.array, packed: mx.array) -> mx.array:
    """Return ``y @ weight``, ``[..., inputs]`` for ``[..., outputs]``; unpacks a part at a time."""
    panels, inputs, _ = packed.shape
    y = mx.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, panels * PANEL - y.shape[-1])])
    step = max(1, _UNPACKED_BYTES // (inputs * PANEL * 4))
    total = mx.zeros((*y.shape[:-1], inputs), mx.float32)
    for at in range(0, panels, step):
        part = packed[at : at + step].swapaxes(1, 2).reshape(-1, inputs).astype(mx.float32)
        total = total + y[..., at * PANEL : at * PANEL + len(part)] @ part
    return total


@contextmanager
def with_gradients(model: Any) -> Iterator[None]:
    """Let packed layers have gradients with respect to their inputs."""
    layers = [module for _, module in model.named_modules() if isinstance(module, _Packed)]
    libraries: list[Any] = [layer._library for layer in layers]  # noqa: SLF001 - same module
    try:
        for layer, library in zip(layers, libraries, strict=True):
            layer._library = _WithGradient(library)  # noqa: SLF001 - same module
        yield
    finally:
        for layer, library in zip(layers, libraries, strict=True):
            layer._library = library  # noqa: SLF001 - same module


class PackedLinear(_Packed):
    """`nn.Linear` over a packed weight."""

    def __init__(self, library: ModuleType, layer: nn.Module) -> None:
        super().__init__(library, layer)
        if "bias" in layer:
            self.bias = layer.bias

    @property
    def product_bias(self) -> mx.array | None:
        """``[outputs]``: the bias that is added to the product; None if there is none."""
        return self.bias if "bias" in self else None

    def __call__(self, x: mx.array) -> mx.array:
        return self._product(x, self.product_bias)


class PackedPart(PackedLinear):
    """`nn.ShardedToAllLinear` over a packed weight: one rank's inputs of a divided linear layer.

    Its product is a term of a sum over the ranks of ``group``. The bias is added to the sum.
    """

    def __init__(self, library: ModuleType, layer: nn.Module) -> None:
        super().__init__(library, layer)
        self.group = layer.group

    @property
    def product_bias(self) -> None:
        return None

    def __call__(self, x: mx.array) -> mx.array:
        return self.total(super().__call__(x))

    def total(self, product: mx.array) -> mx.array:
        """Return the layer's output, from this rank's product; lazy."""
        found: mx.array = mx.distributed.all_sum(product, group=self.group)
        return found + self.bias if "bias" in self else found


class PackedEmbedding(_Packed):
    """`nn.Embedding` over a packed weight."""

    def __call__(self, ids: mx.array) -> mx.array:
        if ids.dtype != mx.int32:
            ids = ids.astype(mx.int32)
        return cast(mx.array, self._library.look_up(ids, self.packed, self.outputs))

    def as_linear(self, x: mx.array) -> mx.array:
        return self._product(x, None)


_KINDS: dict[type, type[_Packed]] = {
    nn.Linear: PackedLinear,
    nn.AllToShardedLinear: PackedLinear,  # one rank's outputs of a divided layer
    nn.ShardedToAllLinear: PackedPart,
    nn.Embedding: PackedEmbedding,
}


def pack_weights(model: Any, library: ModuleType) -> None:
    """Replace a model's dense linear layers and embeddings with packed ones.

    Lazy except for float32 weights, whose values are checked. Only layers whose class is exactly
    MLX's own are replaced; a model's subclasses stay. So do layers of fewer than `PANEL` inputs,
    because Gemma 3n assigns to the weights of such layers in every step.
    """
    replaced: dict[int, _Packed] = {}
    originals: list[Any] = []  # kept alive, so that no other module gets the id of one

    def packed(child: Any) -> Any:
        if id(child) in replaced:  # a shared layer stays shared
            return replaced[id(child)]
        kind = _KINDS.get(type(child))
        if kind is None or child.weight.dtype not in _DTYPES:
            return child
        if child.weight.shape[-1] < PANEL:
            return child
        replaced[id(child)] = kind(library, child)
        originals.append(child)
        child.pop("weight")  # otherwise unpacked weights would stay in memory until the end
        return replaced[id(child)]

    for module in list(model.modules()):
        for name, child in list(module.items()):
            if isinstance(child, nn.Module):
                module[name] = packed(child)
            elif isinstance(child, list):
                module[name] = [packed(item) for item in child]
            elif isinstance(child, dict):
                module[name] = {key: packed(item) for key, item in child.items()}


def packed_arrays(model: Any) -> list[mx.array]:
    """Return the packed weights, which are not parameters in MLX's sense."""
    found = {
        id(module): module.packed
        for _, module in model.named_modules()
        if isinstance(module, _Packed)
    }
    return list(found.values())
