"""The kernel that copies pages from page-locked memory, compiled as C++ for this processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.cache import cuda_driver, device_copy, host_copy
from kvd.worker.cache.host_copy import copy_pages
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.snapshot_records import bytes_of
from kvd.worker.prefix.record_memory import RecordMemory
from tests.worker.cache.compiled_kernels import address, compile_kernel, needs_gcc
from tests.worker.cache.cuda import Driver

pytestmark = [pytest.mark.mlx, needs_gcc]

_ARGUMENTS = (
    "const uint64_t* place, const int32_t* slots, const int* slots_shape, void* const* arrays,"
    " uint32_t* done"
)


class Compiled:
    """Compiles the kernels of `device_copy`, and counts their launches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launches = 0
        self.change: Callable[[str], str] = lambda source: source

    def __call__(self, shape: device_copy.PageShape) -> Any:
        arrays = [f"const void* a{at} = arrays[{at}];" for at in range(len(shape.sizes))]
        source = self.change(device_copy.source_of(shape))
        library = compile_kernel(self._folder, _ARGUMENTS, arrays, source)

        def launch(*, inputs: Sequence[mx.array], grid: Any, threadgroup: Any, **_: Any) -> Any:
            self.launches += 1
            place, slots, *arrays = inputs
            done = mx.zeros((1,), mx.uint32)
            mx.eval(done)
            shape = (ctypes.c_int * 1)(slots.shape[0])
            pools = (ctypes.c_void_p * len(arrays))(*map(address, arrays))
            pointers = map(ctypes.c_void_p, (address(place), address(slots)))
            blocks = grid[0] // threadgroup[0]
            library.run(
                *pointers, shape, pools, ctypes.c_void_p(address(done)), threadgroup[0], blocks
            )
            assert done.item() == 1
            return [done]

        return launch


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    made, driver = Compiled(tmp_path), Driver(fails_from=1 << 30)
    monkeypatch.setattr(device_copy, "_kernel", made)
    monkeypatch.setattr(device_copy, "_prepared", {})
    monkeypatch.setattr(device_copy, "_stream", lambda: None)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    return made


def pool_of(scheme: Scheme = Scheme(8, 4)) -> PagePool:  # noqa: B008 - it is immutable
    pool = PagePool(LayerGeometry(2, 64, 64), scheme, mx.bfloat16)
    pool.grow(40)
    return pool


def record_of(pool: PagePool, pages: int) -> bytes:
    keys, values = (mx.random.normal((pages, 2, 64, 64)).astype(mx.bfloat16) for _ in range(2))
    packed = pool.pack(keys, values)
    return bytes_of([array for side in packed for array in side])


@pytest.mark.parametrize("scheme", [Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)], ids=str)
def test_copies_equal_those_of_the_host(kernels: Compiled, scheme: Scheme) -> None:
    pool, other = pool_of(scheme), pool_of(scheme)
    device_copy.prepare(pool.arrays())
    checks = kernels.launches
    memory = RecordMemory(1 << 20, cuda_driver.lock)
    memory.open()
    memory.take(300)  # records begin anywhere in the memory
    for slots in (list(range(16)), [3, None, 39, 7], [None, None], [5]):
        record = record_of(pool, len(slots))
        place = memory.take(len(record))
        place[:] = record

        wait = copy_pages(pool.arrays(), slots, place)
        assert wait is not None
        wait()
        # Ordinary memory: without the kernel.
        assert copy_pages(other.arrays(), slots, record) is None

        assert bytes_of(pool.arrays()) == bytes_of(other.arrays())
    assert kernels.launches - checks == 4
    assert checks == 1
    assert device_copy.is_used()
    assert not host_copy.needs_idle_device()


def test_a_kernel_that_is_wrong_is_not_used(kernels: Compiled) -> None:
    kernels.change = lambda source: source.replace("slot >= 0", "slot > 1")
    pool = pool_of()
    device_copy.prepare(pool.arrays())
    assert kernels.launches == 1
    assert not device_copy.is_used()
    assert host_copy.needs_idle_device()
    with_memory(pool)
    assert kernels.launches == 1


def test_a_kernel_that_does_not_compile_is_not_used(
    kernels: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_shape: device_copy.PageShape) -> Any:
        raise RuntimeError("failed to compile")

    monkeypatch.setattr(device_copy, "_kernel", fail)
    pool = pool_of()
    device_copy.prepare(pool.arrays())
    assert not device_copy.is_used()
    with_memory(pool)


def test_without_cuda_no_kernel_is_prepared(
    kernels: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: None)
    pool = pool_of()
    device_copy.prepare(pool.arrays())
    assert kernels.launches == 0
    assert not host_copy.needs_idle_device()
    with_memory(pool)


def with_memory(pool: PagePool) -> None:
    """Copy pages from the memory of records, and compare."""
    memory = RecordMemory(1 << 20, cuda_driver.lock)
    memory.open()
    record = record_of(pool, 3)
    place = memory.take(len(record))
    place[:] = record
    if (wait := copy_pages(pool.arrays(), [4, 5, 9], place)) is not None:
        wait()
    found = pool.copy(mx.array([4, 5, 9]))
    assert bytes_of([array for side in found for array in side]) == record
