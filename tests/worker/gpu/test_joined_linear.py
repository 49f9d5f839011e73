"""Linear layers that read one input share a product, with the results of separate layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from bench.gpu.graph import VIEWS, primitives
from kvd.worker.gpu import joined_linear

pytestmark = pytest.mark.mlx


class Attention(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 64, bias=bias)
        self.k_proj = nn.Linear(32, 16, bias=bias)
        self.v_proj = nn.Linear(32, 24, bias=bias)
        self.o_proj = nn.Linear(64, 32, bias=bias)

    def __call__(self, x: mx.array, other: mx.array | None = None) -> list[mx.array]:
        q = self.q_proj(x)
        return [q, self.k_proj(x if other is None else other), self.v_proj(x), self.o_proj(q)]


class Wide(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 48, bias=bias)
        self.up_proj = nn.Linear(32, 48, bias=bias)
        self.down_proj = nn.Linear(48, 40, bias=bias)

    def __call__(self, x: mx.array) -> list[mx.array]:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return [gate, up, self.down_proj(up)]


class Model(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.layers = [Attention(bias=bias), Attention(bias=bias)]
        self.head = nn.Linear(32, 100, bias=False)


def two(*, bias: bool) -> tuple[Model, Model]:
    plain, joined = Model(bias=bias), Model(bias=bias)
    joined.update(plain.parameters())
    joined_linear.join(joined)
    return plain, joined


def assert_same(got: list[mx.array], want: list[mx.array]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert mx.isfinite(one).all()
        assert mx.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8, 1, 32), (1, 7, 32), (5, 32), (2, 3, 4, 32)])
def test_the_same_products(shape: tuple[int, ...], *, bias: bool) -> None:
    plain, joined = two(bias=bias)
    x = mx.random.normal(shape)
    for joined_layer, plain_layer in zip(joined.layers, plain.layers, strict=True):
        assert_same(joined_layer(x), plain_layer(x))
    assert_same([joined.head(x)], [plain.head(x)])


def test_layers_that_read_one_input_share_a_product() -> None:
    _, joined = two(bias=False)
    x = mx.random.normal((8, 1, 32))
    q, k, v, _ = joined.layers[0](x)
    mx.eval(q, k, v)
    group = joined.layers[0].q_proj.joined

    assert [type(one) for one in joined.layers[0].children().values()] == [
        joined_linear.JoinedLinear
    ] * 4
    assert group is joined.layers[0].v_proj.joined
    assert group is not joined.layers[1].q_proj.joined
    assert (group._input, group._left) == (None, {})


def test_a_different_input_gets_its_own_product() -> None:
    plain, joined = two(bias=True)
    x, other = mx.random.normal((3, 1, 32)), mx.random.normal((3, 1, 32))

    assert_same(joined.layers[0](x, other), plain.layers[0](x, other))
    assert_same(joined.layers[0](x), plain.layers[0](x))
    group = joined.layers[0].q_proj.joined
    assert (group._input, group._left) == (None, {})


def test_nothing_is_kept_if_a_model_skips_a_layer() -> None:
    plain, joined = two(bias=True)
    for seed in range(3):
        x = mx.random.normal((3, 1, 32), key=mx.random.key(seed))
        assert_same([joined.layers[0].q_proj(x)], [plain.layers[0].q_proj(x)])
    group = joined.layers[0].q_proj.joined
    assert (group._input, group._left) == (None, {})
    assert_same(joined.layers[0](x), plain.layers[0](x))


@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_use_the_given_product(*, bias: bool) -> None:
    plain, joined = Wide(bias=bias), Wide(bias=bias)
    joined.update(plain.parameters())
    shapes: list[tuple[int, ...]] = []

    def product(x: mx.array, weight: mx.array, sizes: Sequence[int]) -> list[mx.array]:
        shapes.append(x.shape)
        ends = [sum(sizes[: count + 1]) for count in range(len(sizes) - 1)]
        return list(mx.split(x @ weight.T, ends, axis=-1))

    joined_linear.join(joined, product)
    for shape in [(8, 1, 32), (8, 3, 32)]:  # a decode step, then chunks of prompts
        x = mx.random.normal(shape)
        assert_same(joined(x), plain(x))

    assert shapes == [(8, 1, 32)]  # down_proj has 48 inputs, which the kernel does not accept


@pytest.mark.parametrize("bias", [True, False])
def test_divided_layers_add_their_bias_to_the_sum(
    monkeypatch: pytest.MonkeyPatch, *, bias: bool
) -> None:
    plain, divided = Attention(bias=bias), Attention(bias=bias)
    divided.update(plain.parameters())
    group = mx.distributed.init()  # of this process alone
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        kind = nn.ShardedToAllLinear if name == "o_proj" else nn.AllToShardedLinear
        divided[name] = kind.from_linear(divided[name], group=group)
    assert joined_linear.dtype_of(divided) == mx.float32
    joined_linear.join(divided)
    assert divided.q_proj.joined is divided.k_proj.joined is divided.v_proj.joined
    assert type(divided.o_proj) is joined_linear.JoinedPart
    x = mx.random.normal((8, 1, 32))
    *separate, output = plain(x)
    assert_same(divided(x), [*separate, output])
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: 3 * x)
    added = plain.o_proj.bias if bias else mx.zeros(32)
    assert_same(divided(x)[3:], [3 * (output - added) + added])


def test_compiled_steps_join_too() -> None:
    plain, joined = two(bias=True)
    compiled = mx.compile(joined.layers[0].__call__)
    for _ in range(3):
        x = mx.random.normal((4, 1, 32))
        assert_same(compiled(x), plain.layers[0](x))


def test_weights_are_counted_and_readable() -> None:
    plain, joined = two(bias=False)
    sizes = [array.size for array in joined_linear.joined_arrays(joined)]

    assert sum(sizes) == sum(array.size for array in _arrays(plain))
    assert not _arrays(joined)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        joined_layer, plain_layer = joined.layers[1][name], plain.layers[1][name]
        assert mx.array_equal(joined_layer.weight, plain_layer.weight)


def test_layers_that_differ_are_not_joined() -> None:
    model = Attention(bias=False)
    model.k_proj.weight = model.k_proj.weight.astype(mx.float16)
    joined_linear.join(model)

    assert len(model.q_proj.joined.sizes) == 1
    assert model.q_proj.joined is not model.v_proj.joined


def _arrays(model: Any) -> list[mx.array]:
    return [array for _, array in nn.utils.tree_flatten(model.parameters())]


def test_logits_of_few_rows_use_the_product_too() -> None:
    calls = []

    def product(x: mx.array, weight: mx.array, sizes: Sequence[int]) -> list[mx.array]:
        calls.append((x.shape, list(sizes)))
        return [x @ weight.T]

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(48, 32)

    plain, joined = Tied(), Tied()
    joined_linear.join(joined, product)
    joined.update(plain.parameters())
    tokens, few, many = mx.array([[3, 47]]), mx.random.normal((8, 1, 32)), mx.zeros((1, 9, 32))

    assert_same([joined.embed_tokens(tokens)], [plain.embed_tokens(tokens)])
    for x in (few, many, few.astype(mx.float16)):
        assert_same([joined.embed_tokens.as_linear(x)], [plain.embed_tokens.as_linear(x)])
    assert calls == [((8, 1, 32), [48])]


@pytest.mark.parametrize("sequences", [1, 8, 1000])
def test_the_weights_are_not_copied(sequences: int):
    """In a pass of 2048 prompt tokens, an H200 was busy with copies of weights 24 of 38 ms."""
    _, model = two(bias=False)
    mx.eval(joined_linear.joined_arrays(model))
    products = model.layers[0](mx.zeros((sequences, 1, 32)))
    assert not primitives(products).keys() & {"Gather", "Contiguous", "Copy"}
    assert not primitives([model.layers[0].k_proj.weight]).keys() - VIEWS
    model.layers[1](mx.zeros((sequences, 1, 32)), mx.ones((sequences, 1, 32)))  # other keys' input
    alone = model.layers[1].k_proj(mx.zeros((sequences, 1, 32)))
    assert not primitives([alone]).keys() & {"Gather", "Contiguous", "Copy"}
