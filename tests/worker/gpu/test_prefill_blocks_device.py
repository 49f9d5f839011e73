"""Packed prefills of whole layers by CUDA kernels, on machines with CUDA."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from bench.gpu import shapes
from kvd.worker.cache import device_pages
from kvd.worker.cache.scheme import Scheme
from kvd.worker.gpu import blocks, joined_linear, products
from kvd.worker.serving import kernel_choice
from tests.worker.gpu.test_prefill_blocks import PASSES, Side, check_steps_in_flight

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("scheme", [Scheme(8, 8), Scheme(4, 4), Scheme(16, 16)], ids=str)
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
def test_blocks_prefill_like_the_layers_own_code(
    passes: list[list[tuple[int, int]]], scheme: Scheme
) -> None:
    """Both sides decode with kernels, so that only the prefill differs."""
    sides = []
    for fuses in (False, True):
        model = shapes.build("tiny", mx.bfloat16)
        product = products.find(mx.bfloat16)
        joined_linear.join(model, product)
        if fuses:
            assert blocks.fuse(model) == len(model.layers)
        sides.append(Side(model, kernel_choice.find_kernels(), (scheme,)))
    for store in sides[1].runner.cache.stores:  # the other side writes pages with MLX's operations
        for pool in (pool for layer in store.layers for pool in layer.pools):
            device_pages.prepare(pool.arrays())
            assert pool.is_written_by_kernel
    for side in sides:
        side.join(1 + max(row for chunks in passes for row, _ in chunks))
    launched = [side.backend.launched() for side in sides if side.backend is not None]
    for chunks in passes:
        for side in sides:
            side.prefill(chunks)
        for _ in range(70):  # each row commits a page
            want, got = (side.step() for side in sides)
            assert np.isfinite(got).all()
            assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
    counts = [
        side.backend.launched() - before
        for side, before in zip(sides, launched, strict=True)
        if side.backend is not None
    ]
    assert counts[1] > counts[0]


def side_of(model: nn.Module, scheme: Scheme) -> Side:
    """Return a side whose prefill, decode attention and pages are kernels."""
    side = Side(model, kernel_choice.find_kernels(), (scheme,))
    for store in side.runner.cache.stores:
        for pool in (pool for layer in store.layers for pool in layer.pools):
            device_pages.prepare(pool.arrays())
            assert pool.is_written_by_kernel
    return side


@pytest.mark.parametrize("scheme", [Scheme(8, 8), Scheme(4, 4)], ids=str)
def test_steps_in_flight_change_no_number(scheme: Scheme) -> None:
    model = shapes.build("tiny", mx.bfloat16)
    joined_linear.join(model, products.find(mx.bfloat16))
    assert blocks.fuse(model) == len(model.layers)
    check_steps_in_flight((side_of(model, scheme), side_of(model, scheme)))
