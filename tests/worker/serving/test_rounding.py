"""`token_floor`: the measured number of tokens from which all prefills round alike."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from mlx import nn

from kvd.worker.serving import rounding
from kvd.worker.serving.rounding import MOST_TOKENS, batch_floor, token_floor

pytestmark = pytest.mark.mlx


class Model(nn.Module):
    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.layers = [nn.Linear(inputs, outputs) for inputs, outputs in shapes]


@pytest.mark.parametrize("shape", [(256, 256), (256, 128), (64, 96), (96, 64), (768, 256)])
def test_from_the_floor_on_rounding_depends_neither_on_length_nor_on_position(
    shape: tuple[int, int],
) -> None:
    model = Model(shape)
    floor = token_floor(model)
    assert floor is not None, "these weights are wide enough for a floor"
    (layer,) = model.layers
    tokens = mx.random.normal((320, shape[0]))
    right = layer(tokens)
    for count in (*range(floor, 50), *range(50, 321, 27)):
        assert mx.array_equal(layer(tokens[:count]), right[:count])
    for start in range(7, 280, 39):
        assert mx.array_equal(layer(tokens[start:]), right[start:])


def test_the_layer_with_the_highest_floor_decides() -> None:
    floors = [token_floor(Model(shape)) for shape in ((256, 256), (96, 64))]

    assert token_floor(Model((256, 256), (96, 64))) == max(floors)


def test_divided_layers_are_measured_without_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a rank would wait for the others")

    whole, divided = Model((96, 64), (256, 128)), Model((96, 64), (256, 128))
    group = mx.distributed.init()  # of this process alone
    for index, kind in enumerate((nn.AllToShardedLinear, nn.ShardedToAllLinear)):
        divided.layers[index] = kind.from_linear(whole.layers[index], group=group)
    monkeypatch.setattr(mx.distributed, "all_sum", fail)
    assert token_floor(divided) == token_floor(whole)
    assert batch_floor(divided) == batch_floor(whole)
    quantized = Model((128, 64))
    layer = nn.QuantizedLinear.from_linear(quantized.layers[0])
    quantized.layers[0] = nn.QuantizedShardedToAllLinear.from_quantized_linear(layer, group=group)
    assert (token_floor(quantized), batch_floor(quantized)) == (1, 1)


def test_where_padding_would_be_long_there_is_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router of few experts is an example, if BLAS has a separate kernel for narrow weights."""
    right = nn.Linear.__call__

    def small(layer: nn.Linear, x: mx.array) -> mx.array:
        return right(layer, x) + (1e-6 if x.shape[0] < MOST_TOKENS + 10 else 0.0)

    monkeypatch.setattr(nn.Linear, "__call__", small)
    assert token_floor(Model((64, 8))) is None


def test_large_weights_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MOST_ELEMENTS", 64 * 96 - 1)

    assert token_floor(Model((64, 96))) == 1


def test_narrow_weights_are_compared_with_chunks_that_are_long_enough() -> None:
    """With a router of four experts, even 300 tokens make a small product."""
    model = Model((64, 4))
    floor = token_floor(model)
    tokens = mx.random.normal((2048, 64))
    right = model.layers[0](tokens)
    agree = [
        bool(mx.array_equal(model.layers[0](tokens[:count]), right[:count]).item())
        for count in range(MOST_TOKENS, 600, 20)
    ]
    assert floor is None or all(agree)


@pytest.mark.parametrize(
    ("dtype", "layers", "error", "is_right"),
    [
        (mx.float32, 64, 5e-5, True),
        (mx.float32, 64, 5e-4, False),
        (mx.bfloat16, 4, 0.015, True),
        (mx.bfloat16, 28, 0.025, False),
        (mx.bfloat16, 64, 0.025, True),
        (mx.bfloat16, 64, 0.04, False),
        (mx.bfloat16, 64, math.nan, False),
    ],
)
def test_logits_agree_except_for_rounding(
    dtype: mx.Dtype, layers: int, error: float, is_right: bool
) -> None:
    expected = mx.array([1.0, -0.5, 0.25, 0.0])
    logits = expected + mx.array([0.0, 0.0, 0.0, error])
    assert rounding.agree(logits.astype(dtype), expected, layers=layers) == is_right
    assert not rounding.agree(logits.astype(dtype), expected, layers=layers, exactly=True)
