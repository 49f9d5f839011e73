"""Finds the batch size from which rounding of a product no longer depends on the batch.

BLAS has separate kernels for small products, with a different order of summation. A row gets the
same logits to the bit in every batch only if one kernel computes batches of all sizes. So small
batches are padded to the size where the large kernels begin. That size depends on the library
and on the model's shapes, so it is measured (OpenBLAS 0.3.21: 10 rows for a weight of 128 x 256, no
padding for 3072 x 1024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

USUAL_FLOOR = 16
"""Rows for products that are not measured: those of layers other than linear and embeddings."""
MOST_ELEMENTS = 4 * 1024 * 1024
"""Elements of the largest weight whose floor is searched. Larger ones do not use BLAS's small
kernels, which one comparison verifies."""
MOST_TOKENS = 32
"""Short prefills are padded to at most this many tokens."""
FLOAT32_ERROR = 1e-4
"""Errors of logits, relative to the largest one, that rounding may cause in float32."""
FLOAT16_ERROR, LAYERS = 2e-2, 28
"""Errors in types of 16 bits, and the number of layers up to which they hold. 24 layers in
bfloat16 reach 1.6 %, and 64 layers 2.4 % (H200)."""
_LARGE = (17, 24, 33, 64)
_LARGE_CHUNKS = (40, 64, 100, 151, 300)
_MOST_CHUNK = 4096
_BEYOND = 2 * 1024 * 1024
"""Multiplications of a product that never uses BLAS's small kernels, whatever its shape."""
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_SHARDED = (nn.AllToShardedLinear, nn.ShardedToAllLinear)
_QUANTIZED_SHARDED = (nn.QuantizedAllToShardedLinear, nn.QuantizedShardedToAllLinear)
_PRODUCTS = (nn.Linear, nn.QuantizedLinear, *_EMBEDDINGS, *_SHARDED, *_QUANTIZED_SHARDED)


def batch_floor(model: Any) -> int:
    """Return the number of rows that smaller batches of this model are padded to.

    For the CPU only: accelerators choose kernels in ways that padding cannot even out.
    """
    leaves = [module for _, module in model.named_modules() if not module.children()]
    products = {
        (type(leaf), leaf.weight.shape, leaf.weight.dtype): leaf
        for leaf in leaves
        if isinstance(leaf, _PRODUCTS)
    }
    floor = max(map(_floor, products.values()), default=1)
    return floor if all(map(_is_known, leaves)) else max(floor, USUAL_FLOOR)


def token_floor(model: Any) -> int | None:
    """Return the tokens that shorter prefills are padded to, so that all round alike.

    None if more than `MOST_TOKENS` are needed, as for a router of few experts. For the CPU only.
    Not measured are:

    * logits, which leave nothing in the cache;
    * quantized layers, which compute a row at a time;
    * weights beyond `MOST_ELEMENTS`;
    * layers other than linear ones and embeddings, for which the floor is `MOST_TOKENS`: experts
      sort their inputs from 64 choices on, and 32 tokens have 64 if each chooses two experts.

    The runner therefore checks groups with the whole model, too (`Runner.group`).
    """
    leaves = [module for _, module in model.named_modules() if not module.children()]
    layers = {
        (leaf.weight.shape, leaf.weight.dtype): leaf
        for leaf in leaves
        if isinstance(leaf, (nn.Linear, *_SHARDED)) and leaf.weight.size <= MOST_ELEMENTS
    }
    floor = max(map(_token_floor, layers.values()), default=1)
    if not all(map(_is_known, leaves)):
        floor = max(floor, MOST_TOKENS)
    return floor if floor <= MOST_TOKENS else None


def _token_floor(layer: Any) -> int:
    """Return the tokens from which on rounding does not depend on their number or place."""
    large = -(-_BEYOND // layer.weight.size)  # for narrow weights, such as a router's
    tokens = _inputs(layer, max(_LARGE_CHUNKS[-1], min(large, _MOST_CHUNK)))
    multiply = _product(layer)
    right = multiply(tokens)
    last = right[MOST_TOKENS:]
    agree = _same(multiply(tokens[MOST_TOKENS:]), last) and all(
        _same(multiply(tokens[:count]), right[:count]) for count in _LARGE_CHUNKS
    )
    if not agree:
        return MOST_TOKENS + 1
    counts = range(MOST_TOKENS, 0, -1)
    wrong = (count for count in counts if not _same(multiply(tokens[:count]), right[:count]))
    return next(wrong, 0) + 1


def _product(layer: Any) -> Callable[[mx.array], mx.array]:
    """Return a layer's product, without the sum over all ranks of a divided layer."""
    if isinstance(layer, _EMBEDDINGS):
        return cast("Callable[[mx.array], mx.array]", layer.as_linear)
    if isinstance(layer, _SHARDED):
        return lambda inputs: inputs @ layer.weight.T
    if isinstance(layer, _QUANTIZED_SHARDED):
        return lambda inputs: mx.quantized_matmul(
            inputs, layer.weight, layer.scales, layer.get("biases"),
            group_size=layer.group_size, bits=layer.bits, mode=layer.mode,
        )  # fmt: skip
    return cast("Callable[[mx.array], mx.array]", layer)


def _inputs(layer: Any, rows: int) -> mx.array:
    _, inputs = layer.weight.shape
    if hasattr(layer, "bits"):
        inputs = inputs * 32 // layer.bits
    dtype = layer.scales.dtype if hasattr(layer, "scales") else layer.weight.dtype
    return mx.random.normal((rows, inputs), dtype, key=mx.random.key(0))


def _is_known(leaf: nn.Module) -> bool:
    vectors = all(array.ndim < 2 for _, array in tree_flatten(leaf.parameters()))
    return vectors or isinstance(leaf, _PRODUCTS)


def _floor(layer: Any) -> int:
    multiply = _product(layer)
    rows = _inputs(layer, _LARGE[-1])

    def first_row(count: int) -> mx.array:
        found: mx.array = multiply(rows[:count])[0]
        return found

    right = first_row(_LARGE[-1])
    if not all(_same(right, first_row(count)) for count in _LARGE):
        return USUAL_FLOOR  # no number of rows is right; this one suffices for most shapes
    if layer.weight.size > MOST_ELEMENTS:
        return 1 if _same(right, first_row(1)) else USUAL_FLOOR
    wrong = (count for count in range(USUAL_FLOOR, 0, -1) if not _same(right, first_row(count)))
    return next(wrong, 0) + 1


def _same(result: mx.array, expected: mx.array) -> bool:
    return bool(mx.array_equal(result, expected).item())


def agree(
    logits: mx.array, expected: mx.array, *, layers: int = LAYERS, exactly: bool = False
) -> bool:
    """Return whether logits are finite and differ by rounding at most; ``exactly``: not at all.

    ``layers``: number of the model's layers. In types of 16 bits, the bound grows with the square
    root of those above `LAYERS`, as independent errors add up.
    """
    if not bool((mx.isfinite(logits) & mx.isfinite(expected)).all().item()):
        return False
    if exactly:
        return bool(mx.array_equal(logits, expected).item())
    share = FLOAT32_ERROR
    if logits.dtype != mx.float32:
        share = FLOAT16_ERROR * math.sqrt(max(1.0, layers / LAYERS))
    bound = share * mx.abs(logits).max()
    return bool((mx.abs(logits - expected).max() <= bound).item())
