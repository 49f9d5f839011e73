"""The kernels that write pages and resize pools, compiled as C++ for this processor."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.artifacts.cuda_text import KernelText
from kvd.worker.cache import device_pages, page_kernels
from kvd.worker.cache.page_kernels import PageShape
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from tests.worker.cache.test_device_copy import address
from tests.worker.kernels import compiler
from tests.worker.kernels.build import compiler as find_gcc

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(find_gcc() is None, reason="the kernels are compiled with g++"),
]

_PROGRAM = """
#include <cstddef>
#include <cstdint>
struct uint4 {{ uint32_t x, y, z, w; }};
struct Three {{ int x; }};
extern "C" void run(void* const* arrays, const int* slots_shape, int threads, int blocks) {{
  const Three blockDim = {{threads}}, gridDim = {{blocks}};
  {arrays}
  for (int block = 0; block < blocks; ++block)
    for (int thread = 0; thread < threads; ++thread) {{
      const Three blockIdx = {{block}}, threadIdx = {{thread}};
      {source}
    }}
}}
"""


class Compiled:
    """Compiles the kernels of `device_pages`, and counts their launches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launches = 0
        self.change: Callable[[str], str] = lambda source: source

    def __call__(self, text: KernelText) -> Any:
        source = self.change(text.source)
        path = self._folder / f"{abs(hash(source))}.so"
        if not path.exists():
            names = [one.name for one in (*text.inputs, *text.outputs)]
            types = {"slots": "const int*", "sizes": "const int*", "done": "uint32_t*"}
            arrays = [
                f"{types.get(name, 'void*')} {name} = ({types.get(name, 'void*')})arrays[{at}];"
                for at, name in enumerate(names)
            ]
            cpp = path.with_suffix(".cpp")
            cpp.write_text(_PROGRAM.format(arrays=" ".join(arrays), source=source))
            command = [find_gcc() or "g++", "-shared", "-fPIC", "-O1", "-o", str(path), str(cpp)]
            subprocess.run(command, check=True, capture_output=True)
        library = ctypes.CDLL(str(path))

        def launch(
            *,
            inputs: Sequence[mx.array],
            grid: Any,
            threadgroup: Any,
            output_shapes: Any,
            output_dtypes: Any,
        ) -> list[mx.array]:
            self.launches += 1
            outputs = [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            mx.eval(inputs, outputs)
            pointers = (ctypes.c_void_p * (len(inputs) + len(outputs)))(
                *map(address, [*inputs, *outputs])
            )
            count = (ctypes.c_int * 1)(inputs[0].shape[0])
            library.run(pointers, count, threadgroup[0], grid[0] // threadgroup[0])
            return outputs

        return launch


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    made = Compiled(tmp_path)
    monkeypatch.setattr(page_kernels, "kernel_of", made)
    monkeypatch.setattr(device_pages, "_prepared", {})
    monkeypatch.setattr(device_pages, "on_cuda", lambda: True)
    device_pages._put_kernel.cache_clear()
    device_pages._resize_kernel.cache_clear()
    yield made
    device_pages._put_kernel.cache_clear()
    device_pages._resize_kernel.cache_clear()


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
