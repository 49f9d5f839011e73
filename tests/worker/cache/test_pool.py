"""Pools: exact bytes, contents under every scheme, and all kinds of head sizes."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import BITS, LayerGeometry, Packing, Scheme
from protocol.schemes import K_GROUPS, V_GROUPS

pytestmark = pytest.mark.mlx

DIMS = [
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (256, 256),
    (576, 0),
    (8, 8),
    (48, 32),
]
GROUPS = list(itertools.product(K_GROUPS, V_GROUPS))


def filled(geometry: LayerGeometry, scheme: Scheme, pages: int = 3) -> PagePool:
    pool = PagePool(geometry, scheme, mx.float32)
    pool.grow(pages)
    pool.write(range(pages), *pool.pack(*random(geometry, pages)))
    mx.eval(pool.arrays())
    return pool


def random(geometry: LayerGeometry, pages: int) -> tuple[mx.array, mx.array]:
    mx.random.seed(pages)
    heads = (pages, geometry.kv_heads, 64)
    return mx.random.normal((*heads, geometry.k_dim)), mx.random.normal((*heads, geometry.v_dim))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("k_dim", "v_dim"), DIMS)
def test_page_bytes_are_those_of_the_arrays(k_dim: int, v_dim: int, dtype: mx.Dtype):
    for k_bits, v_bits, (k_group, v_group) in itertools.product(BITS, BITS, GROUPS):
        scheme = Scheme(k_bits, v_bits, k_group, v_group)
        geometry = LayerGeometry(2, k_dim, v_dim, itemsize=dtype.size)
        pool = PagePool(geometry, scheme, dtype)
        pool.keys, pool.values = pool._empty_keys(3), pool._empty_values(3)

        held = sum(array.nbytes for array in pool.arrays())
        assert held == pool.nbytes == 3 * geometry.page_bytes(scheme), scheme


@pytest.mark.parametrize(("k_dim", "v_dim"), DIMS)
def test_pages_read_back_within_the_error_of_their_bits(k_dim: int, v_dim: int):
    """The error of each side depends on its own bits, in every orientation."""
    geometry = LayerGeometry(2, k_dim, v_dim)
    keys, values = random(geometry, 3)
    for k_group, v_group in GROUPS:
        errors = []
        for bits in BITS:
            pool = filled(geometry, Scheme(bits, bits, k_group, v_group))
            shown = pool.read(mx.arange(3))
            assert [it.shape for it in shown] == [keys.shape, values.shape]
            assert all(mx.isfinite(it).all() for it in shown)
            errors.append(
                [
                    float(np.sqrt(np.square(np.array(got - want)).mean())) if want.size else 0.0
                    for got, want in zip(shown, (keys, values), strict=True)
                ]
            )
        for side in range(2 if v_dim else 1):
            mine = [error[side] for error in errors]
            assert mine == sorted(mine, reverse=True), "more bits, less error"
            assert mine[0] > 0.2
            assert mine[-2] < 0.01
            assert mine[-1] == 0.0
        assert v_dim or errors[0][1] == 0.0


def test_smaller_groups_have_smaller_errors():
    geometry = LayerGeometry(2, 128, 128)
    values = random(geometry, 3)[1]
    errors = [
        mx.square(filled(geometry, Scheme(16, 4, 64, group)).read(mx.arange(3))[1] - values).mean()
        for group in V_GROUPS
    ]

    assert errors[0].item() < errors[1].item() < errors[2].item()


def test_converting_changes_only_sides_with_another_packing():
    geometry = LayerGeometry(2, 64, 96)
    source = filled(geometry, Scheme(8, 8))

    for target, kept in (
        (Scheme(8, 4), (True, False)),
        (Scheme(4, 8), (False, True)),
        (Scheme(8, 8, 64, 32), (True, False)),  # the same bits, but smaller groups per token
        (Scheme(8, 8, 64, 128), (True, True)),  # per channel as before: 128 does not divide 96
    ):
        pool = PagePool(geometry, target, mx.float32)
        converted = source.converted(mx.arange(3), pool)
        for side, (now, before, same) in enumerate(
            zip(converted, source.copy(mx.arange(3)), kept, strict=True)
        ):
            if same:
                assert all(map(mx.array_equal, now, before)), (target, side)
            else:
                assert [it.shape for it in now] != [it.shape for it in before], (target, side)
        pool.grow(3)
        pool.write(range(3), *converted)
        for got, want in zip(pool.read(mx.arange(3)), source.read(mx.arange(3)), strict=True):
            assert mx.isfinite(got).all()
            assert mx.abs(got - want).mean().item() < 0.12, target


@pytest.mark.parametrize("scheme", [Scheme(16, 16), Scheme(16, 4), Scheme(5, 3)])
def test_a_pool_that_one_write_fills_is_contiguous(scheme: Scheme):
    for array in filled(LayerGeometry(2, 64, 64), scheme).arrays():
        assert memoryview(array).c_contiguous


def test_an_orientation_is_part_of_the_packing():
    geometry = LayerGeometry(1, 64, 64)

    assert geometry.values(Scheme(8, 8)) == Packing(8, 64, per_token=True)
    assert geometry.values(Scheme(8, 8, 64, 128)) == Packing(8, 64, per_token=False)


def test_an_empty_value_side_is_never_quantized(monkeypatch: pytest.MonkeyPatch):
    """Writes, reads, growth, conversion and cuts work with an empty side, which takes 0 bytes."""
    geometry = LayerGeometry(1, 64, 0)
    shapes: list[tuple[int, ...]] = []
    quantize = mx.quantize

    def watched(x: mx.array, **how: int):
        shapes.append(x.shape)
        return quantize(x, **how)

    monkeypatch.setattr(mx, "quantize", watched)
    pool = filled(geometry, Scheme(4, 4))
    lower = PagePool(geometry, Scheme(2, 2), mx.float32)
    lower.grow(2)
    lower.write(range(2), *pool.converted(mx.array([0, 2]), lower))
    lower.grow(4)
    lower.cut(1)
    mx.eval(lower.arrays())

    assert shapes, "keys are quantized"
    assert all(0 not in shape for shape in shapes)
    assert pool.nbytes == sum(it.nbytes for it in pool.arrays()) == sum(i.nbytes for i in pool.keys)
    assert lower.read(mx.array([0]))[1].shape == (1, 1, 64, 0)
    assert mx.isfinite(lower.read(mx.array([0]))[0]).all()
