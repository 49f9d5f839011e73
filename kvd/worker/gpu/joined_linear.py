"""Joins the weights of linear layers that read the same input, so that one product serves them all.

A decode step of few rows launches its products one by one, and on a GPU launching a product takes
longer than computing it (9.6 µs with MLX on CUDA; launching a norm takes 1.7 to 2.6 µs). Queries,
keys and values are products of one input, and so are the two halves of a gated MLP. Their weights
are joined. The first of the layers to be called multiplies for all, and the others take their parts
of the result.

MLX multiplies with a view of the weights as ``[1, inputs, outputs]``, which saves three shape
operations per product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx import nn

from kvd.worker.gpu.products import Product, fits

JOINED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same input, in mlx-lm's models."""

_MOST_VIEWS = 64
"""Most sequences for which a view of the weights is kept. A packed prefill has up to thousands."""


class _Joined:
    """The joined weights of some layers, and the parts of the last product not yet taken."""

    def __init__(self, layers: Sequence[Any], product: Product | None) -> None:
        self._product = product
        self.sizes = [layer.weight.shape[0] for layer in layers]
        self.stored = mx.concatenate([layer.weight for layer in layers])
        """``[outputs of all, inputs]``."""
        self.weight = self.stored[None].swapaxes(1, 2)
        """``[1, inputs, outputs of all]``, a view."""
        self.transposed = self.stored.T
        """``[inputs, outputs of all]``, a view. ``weight[0]`` would be a gather, which copies."""
        # The bias of a divided layer is added to the sum, not to the products.
        biases = [layer.bias for layer in layers if _is_plain(layer) and "bias" in layer]
        self.bias = mx.concatenate(biases) if biases else None
        self._views: dict[int, mx.array] = {}
        self._separate = False
        """Whether each layer multiplies alone, because the model gave the layers different inputs.
        """
        self._input: mx.array | None = None
        self._left: dict[int, mx.array] = {}

    def arrays(self) -> list[mx.array]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def _wide(self, batch: int) -> mx.array:
        """Return the weight broadcast to this many sequences: a view that is created once."""
        if batch not in self._views:
            self._views[batch] = mx.broadcast_to(self.weight, (batch, *self.weight.shape[1:]))
            mx.eval(self._views[batch])
        return self._views[batch]

    def part(self, x: mx.array, member: int) -> mx.array:
        if self._separate:
            return self._multiply_alone(x, member)
        if x is not self._input or member not in self._left:
            if self._left:  # the model did not call all layers with the same input
                self._separate, self._input, self._left = True, None, {}
                return self._multiply_alone(x, member)
            self._input, self._left = x, dict(enumerate(self._all(x)))
        found = self._left.pop(member)
        if not self._left:  # keep nothing of a pass after it
            self._input = None
        return found

    def _all(self, x: mx.array) -> list[mx.array]:
        if self._product is not None and fits(x, self.sizes) and x.dtype == self.stored.dtype:
            products = self._product(x, self.stored, self.sizes)
            if self.bias is None:
                return products
            biases = mx.split(self.bias, self._ends)
            return [product + bias for product, bias in zip(products, biases, strict=True)]
        few = x.ndim == 3 and x.shape[0] <= _MOST_VIEWS
        product = x @ (self._wide(x.shape[0]) if few else self.transposed)
        if self.bias is not None:
            product = product + self.bias
        return list(mx.split(product, self._ends, axis=-1)) if self._ends else [product]

    @property
    def _ends(self) -> list[int]:
        return list(accumulate(self.sizes[:-1]))

    def columns(self, member: int) -> slice:
        end = sum(self.sizes[: member + 1])
        return slice(end - self.sizes[member], end)

    def _multiply_alone(self, x: mx.array, member: int) -> mx.array:
        columns = self.columns(member)
        product = x @ self.transposed[:, columns]
        return product if self.bias is None else product + self.bias[columns]


class JoinedLinear(nn.Module):  # type: ignore[misc]
    """`nn.Linear` over its part of joined weights."""

    def __init__(self, joined: _Joined, member: int) -> None:
        super().__init__()
        self.joined = joined
        self._member = member

    @property
    def weight(self) -> mx.array:
        """``[outputs, inputs]``: a view, for models that read it."""
        return self.joined.stored[self.joined.columns(self._member)]

    def __call__(self, x: mx.array) -> mx.array:
        return self.joined.part(x, self._member)


class JoinedPart(JoinedLinear):
    """`nn.ShardedToAllLinear` over joined weights: one rank's inputs of a divided linear layer.

    Its product is a term of a sum over the ranks of ``group``. The bias is added to the sum.
    """

    def __init__(self, joined: _Joined, layer: Any) -> None:
        super().__init__(joined, 0)
        self.group = layer.group
        if "bias" in layer:
            self.bias = layer.bias

    def __call__(self, x: mx.array) -> mx.array:
        return self.total(super().__call__(x))

    def total(self, product: mx.array) -> mx.array:
        """Return the layer's output, from this rank's product; lazy."""
        found: mx.array = mx.distributed.all_sum(product, group=self.group)
        return found + self.bias if "bias" in self else found


class TiedEmbedding(nn.Embedding):  # type: ignore[misc]
    """`nn.Embedding` that computes the logits of few rows with kvd's own product."""

    def __init__(self, embedding: nn.Embedding, product: Product) -> None:
        nn.Module.__init__(self)  # MLX's own initializer creates random weights
        self.weight = embedding.weight
        self._product = product

    def as_linear(self, x: mx.array) -> mx.array:
        sizes = [self.weight.shape[0]]
        if fits(x, sizes) and x.dtype == self.weight.dtype:
            return self._product(x, self.weight, sizes)[0]
        logits: mx.array = super().as_linear(x)
        return logits


def join(model: Any, product: Product | None = None) -> None:
    """Join the layers of a model that read the same input; lazy.

    ``product`` replaces MLX's product for few rows. Only layers of exactly MLX's own classes
    are changed. A layer without a partner becomes a `JoinedLinear` that multiplies alone, and a
    divided layer with a sum over all ranks becomes a `JoinedPart`.
    """
    for module in list(model.modules()):
        if isinstance(module, JoinedLinear):
            continue
        for names in JOINED_NAMES:
            layers = [module[name] for name in names if _is_plain(module.get(name))]
            if len(layers) == len(names) and len(set(map(_layout, layers))) == 1:
                _replace(module, names, layers, product)
        for name, child in list(module.items()):
            if _is_plain(child):
                _replace(module, (name,), [child], product)
            elif type(child) is nn.ShardedToAllLinear:
                module[name] = JoinedPart(_Joined([child], product), child)
            elif product is not None and type(child) is nn.Embedding:
                module[name] = TiedEmbedding(child, product)


def dtype_of(model: Any) -> mx.Dtype | None:
    """Return the dtype of a model's first plain linear layer; None if it has none."""
    layers = (module for module in model.modules() if _is_plain(module))
    return next((layer.weight.dtype for layer in layers), None)


def joined_arrays(model: Any) -> list[mx.array]:
    """Return the joined weights, which are not parameters in MLX's sense."""
    found = {
        id(module.joined): module.joined
        for _, module in model.named_modules()
        if isinstance(module, JoinedLinear)
    }
    return [array for joined in found.values() for array in joined.arrays()]


def _is_plain(child: Any) -> bool:
    """Return whether a layer only multiplies and adds its bias, as one rank's outputs do."""
    return type(child) in (nn.Linear, nn.AllToShardedLinear)


def _layout(layer: Any) -> tuple[object, ...]:
    return layer.weight.shape[1], layer.weight.dtype, "bias" in layer


def _replace(
    module: Any, names: Sequence[str], layers: Sequence[Any], product: Product | None
) -> None:
    joined = _Joined(layers, product)
    for member, name in enumerate(names):
        module[name] = JoinedLinear(joined, member)
