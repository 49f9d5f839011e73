"""Masks of steps in page-locked memory: no buffer is written while a kernel may read it.

A stand-in takes the place of CUDA's driver, and copies when the kernel would be launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.kernels import launch
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.launch import Launch
from kvd.worker.cache import cuda_driver
from kvd.worker.grammar import mask_memory
from kvd.worker.grammar.mask_memory import MaskMemory

pytestmark = pytest.mark.mlx

ROW_BYTES = 20


class Driver:
    """Locks memory of the host, whose addresses are those on the device."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.copied: list[mx.array] = []
        self.waited: list[mx.array] = []

    def lock(self, memory: memoryview) -> Callable[[], None]:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        self.locked[address] = memory.nbytes
        return lambda: self.locked.pop(address, None)

    def device_address(self, address: int, nbytes: int) -> int | None:
        fits = any(at <= address and address + nbytes <= at + n for at, n in self.locked.items())
        return address if fits else None

    def run(self, one: Launch, _: Language) -> list[mx.array]:
        address, words = one.inputs[0].tolist()
        content = ctypes.string_at(address, 4 * words)
        (shape,) = one.output_shapes
        self.copied.append(mx.array(np.frombuffer(content, np.uint32).reshape(shape)))
        return [self.copied[-1]]

    def eval(self, *arrays: mx.array) -> None:
        self.waited += arrays
        mx.synchronize()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda_driver, "is_usable", lambda: True)
    monkeypatch.setattr(cuda_driver, "lock", found.lock)
    monkeypatch.setattr(cuda_driver, "device_address", found.device_address)
    monkeypatch.setattr(launch, "run", found.run)
    return found


def random_masks(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, ROW_BYTES), np.uint8)


def test_masks_arrive_as_they_were_written(driver: Driver) -> None:
    memory = MaskMemory(ROW_BYTES)
    for step, rows in enumerate([3, 8, 1, 9, 2, 40, 40, 5, 8]):
        masks = memory.take(rows)
        masks[:] = wanted = random_masks(rows, step)
        assert np.array_equal(np.array(memory.upload(masks)), wanted)
    assert len(driver.copied) == 9
    assert len(driver.locked) == 3, "memory that became too small is unlocked"


def test_memory_is_written_again_only_after_its_copy(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MaskMemory(ROW_BYTES)
    monkeypatch.setattr(mask_memory.mx, "eval", driver.eval)
    uploaded = []
    for step in range(6):
        masks = memory.take(2)
        before = [array for array in driver.waited if any(array is one for one in uploaded)]
        assert len(before) == max(0, step - 2), "the oldest of three is awaited, and no other"
        masks[:] = random_masks(2, step)
        uploaded.append(memory.upload(masks))


def test_memory_that_is_not_locked_is_copied(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "lock", lambda _: lambda: None)
    memory = MaskMemory(ROW_BYTES)
    masks = memory.take(4)
    masks[:] = wanted = random_masks(4, 1)
    uploaded = memory.upload(masks)
    masks[:] = 0
    assert np.array_equal(np.array(uploaded), wanted)
    assert not driver.copied


def test_all_memory_is_unlocked_with_its_owner(driver: Driver) -> None:
    memory = MaskMemory(ROW_BYTES)
    for rows in (1, 20, 3):
        memory.upload(memory.take(rows))
    assert len(driver.locked) == 3
    del memory
    assert not driver.locked


def test_without_cuda_masks_are_plain_arrays() -> None:
    memory = MaskMemory(ROW_BYTES)
    masks = memory.take(2)
    masks[:] = wanted = random_masks(2, 1)
    assert np.array_equal(np.array(memory.upload(masks)), wanted)
    assert memory.take(0).shape == (0, ROW_BYTES)
