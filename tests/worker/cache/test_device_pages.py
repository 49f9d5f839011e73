"""The kernels that write pages and resize pools, compiled as C++ for this processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.cache import device_pages
from kvd.worker.cache.page_kernels import PageShape
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from tests.worker.cache import compiled_kernels
from tests.worker.cache.compiled_kernels import Compiled
from tests.worker.kernels import compiler

pytestmark = [pytest.mark.mlx, compiled_kernels.needs_gcc]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    yield from compiled_kernels.use(tmp_path, monkeypatch)


def pool_of(scheme: Scheme, pages: int) -> PagePool:
    pool = PagePool(LayerGeometry(2, 64, 64), scheme, mx.bfloat16)
    pool.grow(pages)
    return pool


def some_pages(pool: PagePool, count: int) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
    keys, values = (mx.random.normal((count, 2, 64, 64)).astype(mx.bfloat16) for _ in range(2))
    keys, values = pool.pack(keys, values)
    return tuple(map(mx.contiguous, keys)), tuple(map(mx.contiguous, values))


def contents(pool: PagePool) -> list[np.ndarray]:
    return [np.array(array.view(mx.uint8)) for array in pool.arrays()]


@pytest.mark.parametrize("scheme", [Scheme(8, 8), Scheme(4, 16), Scheme(16, 16)], ids=str)
def test_pages_are_written_like_plain_writes(kernels: Compiled, scheme: Scheme) -> None:
    pool, other = pool_of(scheme, 9), pool_of(scheme, 9)
    for one in (pool, other):
        one.write(list(range(9)), *some_pages(one, 9))
        mx.eval(one.arrays())
    for mine, theirs in zip(pool.arrays(), other.arrays(), strict=True):
        theirs[:] = mine
    device_pages.prepare(pool.arrays())
    assert pool.is_written_by_kernel
    before = kernels.launches
    keys, values = some_pages(pool, 4)
    mx.eval(pool.store([8, None, 0, 3], keys, values))
    assert kernels.launches == before + 1

    kept = mx.array([0, 2, 3])
    other.write([8, 0, 3], *(tuple(array[kept] for array in side) for side in (keys, values)))
    mx.eval(other.arrays())
    for mine, theirs in zip(contents(pool), contents(other), strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("capacity", [3, 20])
def test_resized_pools_keep_their_pages(kernels: Compiled, capacity: int) -> None:
    pool = pool_of(Scheme(8, 4), 9)
    pool.write(list(range(9)), *some_pages(pool, 9))
    before = contents(pool)
    device_pages.prepare(pool.arrays())
    launches = kernels.launches
    (pool.grow if capacity > 9 else pool.cut)(capacity)
    assert kernels.launches == launches + 2
    assert pool.capacity == capacity
    kept = min(capacity, 9)
    for mine, old in zip(contents(pool), before, strict=True):
        assert np.array_equal(mine[:kept], old[:kept])


def test_a_pool_is_emptied_without_a_kernel(kernels: Compiled) -> None:
    pool = pool_of(Scheme(8, 8), 4)
    device_pages.prepare(pool.arrays())
    launches = kernels.launches
    pool.cut(0)
    assert (pool.capacity, kernels.launches) == (0, launches)


def test_an_empty_pool_grows_without_a_kernel(kernels: Compiled) -> None:
    device_pages.prepare(pool_of(Scheme(8, 8), 1).arrays())
    launches = kernels.launches
    assert pool_of(Scheme(8, 8), 5).capacity == 5
    assert kernels.launches == launches


@pytest.mark.parametrize("right", ["slot >= 0", "new1)[at]"])
def test_kernels_are_not_used_if_one_is_wrong(kernels: Compiled, right: str) -> None:
    wrong = {"slot >= 0": "slot > 1", "new1)[at]": "new1)[at / 2]"}[right]
    kernels.change = lambda source: source.replace(right, wrong)
    pool = pool_of(Scheme(8, 8), 4)
    device_pages.prepare(pool.arrays())
    assert not pool.is_written_by_kernel
    assert device_pages.resized(pool.keys, 8) is None
    launches = kernels.launches
    keys, values = some_pages(pool, 1)
    mx.eval(pool.store([2], keys, values))
    assert kernels.launches == launches
    assert np.array_equal(np.array(pool.keys[0][2]), np.array(keys[0][0]))


def test_nvrtc_compiles_the_kernels() -> None:
    nvrtc = compiler.require()
    shape = PageShape.of(pool_of(Scheme(8, 16), 1).arrays())
    for text in (device_pages.put_text(shape), device_pages.resize_text(shape)):
        assert text.symbol.encode() in nvrtc.compile(text.own_text, "sm_90")
