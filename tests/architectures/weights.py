"""Random weights that make a tiny model worth testing: attention is sharp and reaches far back.

mlx-lm's own initial weights give attention that is nearly uniform and logits that hardly depend on
the context, so that a wrong cache would pass. Here every linear map keeps its input's size, norms
are near one, and queries and keys are a little larger, which makes the attention pick.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

Draw = Callable[[mx.array, mx.array], mx.array]


def redraw(model: nn.Module, seed: int, gains: dict[str, float]) -> None:
    """Replace all parameters of ``model`` (float32), the same for the same ``seed``.

    ``gains`` maps a part of a parameter's path to a factor, applied last.
    """
    embeddings = {name for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    drawn = []
    for path, old in tree_flatten(model.parameters()):
        key = mx.random.key(zlib.crc32(f"{seed}:{path}".encode()))
        owner, _, leaf = path.rpartition(".")
        new = mx.random.normal(old.shape, key=key) if owner in embeddings else _draw(leaf, old, key)
        for part, gain in gains.items():
            new = new * gain if part in path else new
        drawn.append((path, new.astype(mx.float32)))
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())


def _draw(leaf: str, old: mx.array, key: mx.array) -> mx.array:
    if leaf in SPECIAL:
        return SPECIAL[leaf](old, key)
    if old.ndim >= 2 and "norm" not in leaf:
        return mx.random.normal(old.shape, key=key) * (GAIN / math.sqrt(_fan_in(leaf, old)))
    return old.astype(mx.float32) + 0.1 * mx.random.normal(old.shape, key=key)


# Above one, so that what a layer adds weighs as much as what it got.
GAIN = 1.4


def _fan_in(leaf: str, old: mx.array) -> int:
    if leaf == "weight" and "conv" in leaf:
        return old.shape[1] * old.shape[2]
    return old.shape[-1]


def _uniform(low: float, high: float) -> Draw:
    return lambda old, key: mx.random.uniform(low, high, old.shape, key=key)


def _near(value: float, width: float) -> Draw:
    return lambda old, key: value + width * mx.random.normal(old.shape, key=key)


# Parameters whose sign or size decides whether a state lives or dies.
SPECIAL: dict[str, Draw] = {
    # decay of a state space per step: exp(-exp(A_log) * softplus(dt_bias + ...)), about 0.97
    "A_log": _uniform(-2.0, 0.5),
    "dt_bias": _uniform(-4.0, -2.0),
    "D": _near(1.0, 0.1),
    "sinks": _near(0.5, 0.5),
}
