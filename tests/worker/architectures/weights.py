"""Random weights that make a tiny model worth testing: attention is sharp and reaches far back.

mlx-lm's own initial weights give nearly uniform attention, and logits that hardly depend on the
context, so a wrong cache would pass. Here the weights of norms are near one, and every linear map
makes its input a little larger (`GAIN`). Larger queries and keys make attention selective.
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
    """Replace all parameters of ``model`` (float32), reproducibly for a ``seed``.

    ``gains`` maps a part of a parameter's path to a factor, applied last.
    """
    embeddings = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    drawn = []
    for path, old in tree_flatten(model.parameters()):
        key = mx.random.key(zlib.crc32(f"{seed}:{path}".encode()))
        new = _normal(old, key) if path in embeddings else _draw(path, old, key)
        for part, gain in gains.items():
            new = new * gain if part in path else new
        drawn.append((path, new))
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())


def _normal(old: mx.array, key: mx.array) -> mx.array:
    return mx.random.normal(old.shape, key=key)


def _draw(path: str, old: mx.array, key: mx.array) -> mx.array:
    if not mx.issubdtype(old.dtype, mx.floating):  # packed weights
        return mx.random.randint(0, 2**31 - 1, old.shape, key=key).astype(old.dtype)
    for end, draw in SPECIAL.items():
        if path.endswith(end):
            return draw(old, key)
    owner = path.rpartition(".")[0].rpartition(".")[2]
    norm = "norm" in owner  # only the last part: the path of dbrx's attention has norm_attn_norm
    if norm and old.ndim == 2:  # one norm per head; in some models the initial weights are zero
        return 1 + 0.1 * _normal(old, key)
    if old.ndim >= 2 and not norm:
        return _normal(old, key) * (GAIN / math.sqrt(_fan_in(path, old)))
    if path.endswith(".bias"):  # mlx draws those of linear layers, by its own random state
        return 0.1 * _normal(old, key)
    return old.astype(mx.float32) + 0.1 * _normal(old, key)


# Above one, so that what a layer adds to its input is as large as the input.
GAIN = 1.4


def _fan_in(path: str, old: mx.array) -> int:
    """Return the inputs per output: a convolution's [channels, taps, inputs], or the last axis."""
    return old.shape[1] * old.shape[2] if "conv" in path and old.ndim == 3 else old.shape[-1]


def _uniform(low: float, high: float) -> Draw:
    return lambda old, key: mx.random.uniform(low, high, old.shape, key=key)


def _near(value: float, width: float) -> Draw:
    return lambda old, key: value + width * _normal(old, key)


# Parameters, by the end of their path, whose sign or size decides whether a state persists.
SPECIAL: dict[str, Draw] = {
    # Decay of a state space: exp(-exp(A_log) * softplus(dt)), a few percent a step.
    "A_log": _uniform(-2.0, 0.5),
    "dt_bias": _uniform(-4.0, -2.0),
    "dt_proj.bias": _uniform(-4.0, -2.0),
    ".D": _near(1.0, 0.1),
    # RWKV 7: share of the previous token, decay exp(-0.6 sigmoid(bias)).
    **{f"attn.x_{name}": _uniform(0.2, 0.8) for name in "rwkvag"},
    "ffn.x_k": _uniform(0.2, 0.8),
    "w_lora.lora.2.bias": _near(-5.0, 0.5),
    "attn.k_k": _near(1.0, 0.1),
    "attn.k_a": _near(1.0, 0.1),
    # Griffin: decay exp(-4 softplus(p)).
    "recurrent_param": _near(-4.5, 0.5),
    "sinks": _near(0.5, 0.5),
    # Two bits per weight: (0..3) * scale + bias, around zero.
    ".scales": _near(0.08, 0.0),
    ".biases": _near(-0.12, 0.0),
}
