"""Computes a model's hidden states and its logits in two steps.

The logits of a chunk are its largest activation: 256 tokens of a vocabulary of 150,000 take 150 MB
in float32. With the hidden states at hand, they can be computed for a few tokens at a time.

mlx-lm's models have no function for their last layer: each class applies its own head, scale and
soft cap in `__call__`. `SplitHead` calls that method on a shallow copy of the model, in which the
inner model returns the given hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

_INNER = ("language_model", "model", "transformer", "backbone")
"""Names of the part that computes hidden states, in mlx-lm's models."""


class SplitHead:
    """One model in two parts, which share the model's weights."""

    def __init__(self, model: Any) -> None:
        self._inner = model
        self._outer: Callable[[Any], Any] = _same
        while (name := _inner_name(self._inner)) is not None:
            self._outer = _nested(self._outer, self._inner, name)
            self._inner = self._inner[name]

    def hidden(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Return the hidden states of ``tokens`` ``[rows, width]``, lazily.

        Raises `ValueError` if the model's class has another form.
        """
        found: list[mx.array] = []

        def run(*args: Any, **kwargs: Any) -> mx.array:
            found.append(self._inner(*args, **kwargs))
            return found[-1]

        logits = self._call(run, tokens, cache)  # never evaluated
        (hidden,) = found
        if hidden.shape[-1] == logits.shape[-1]:
            raise ValueError("the inner model computes logits")
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits of hidden states ``[rows, width, channels]``, lazily."""
        tokens = mx.zeros(hidden.shape[:2], mx.int32)
        return self._call(lambda *_, **__: hidden, tokens, None)

    def _call(self, run: Callable[..., mx.array], tokens: mx.array, cache: Any) -> mx.array:
        inner = copy.copy(self._inner)
        kind = type(inner)
        called = {"__call__": lambda _self, *args, **kwargs: run(*args, **kwargs)}
        object.__setattr__(inner, "__class__", type(kind.__name__, (kind,), called))
        logits: mx.array = self._outer(inner)(tokens, cache=cache)
        return logits


def _same(inner: Any) -> Any:
    return inner


def _inner_name(module: Any) -> str | None:
    return next((name for name in _INNER if isinstance(module.get(name), nn.Module)), None)


def _nested(outer: Callable[[Any], Any], module: Any, name: str) -> Callable[[Any], Any]:
    """Return a function that copies the modules around an inner one, down to ``name``."""

    def build(inner: Any) -> Any:
        shell = copy.copy(module)
        shell[name] = inner
        return outer(shell)

    return build
