"""Fused decode attention in a runner: its logits equal those of plain operations.

Tests have no GPU. Two replacements run instead of kernels: `stand_in.StandIn`, plain operations
over the arrays that a kernel gets, and Metal's source compiled as C++ (`tests.worker.kernels`).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.fused import Fused
from kvd.worker.attention.kernels.language import METAL
from kvd.worker.attention.kernels.launch import Launch
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.step_down import ModelStepDown
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Runner
from tests.worker.architectures.zoo import build
from tests.worker.attention.stand_in import StandIn
from tests.worker.kernels.build import compiler
from tests.worker.kernels.run import run

pytestmark = pytest.mark.mlx
SCHEMES = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))


class Side:
    """A runner and its rows."""

    def __init__(self, model: Any, backend: Backend | None) -> None:
        self.runner = Runner(model, ModelCache(find_layout(model), CacheSettings(SCHEMES)))
        self.runner.cache.use(page_product, backend)
        self.rows: list[Any] = []

    def join(self, length: int) -> None:
        self.rows.append(self.runner.cache.new_row())
        for start in range(0, length, 64):
            chunk = [5 + at % 50 for at in range(start, min(start + 64, length))]
            self.runner.prefill(self.rows[-1], chunk)

    def leave(self, index: int) -> None:
        self.runner.cache.free(self.rows.pop(index))

    def lower(self, index: int, level: int) -> None:
        """Step a row down, except for its newest page: the row then has pages at two levels."""
        cache = self.runner.cache
        cache.flush()
        ModelStepDown(cache, [self.rows[index]], level).advance(1e9, lambda: 0.0)

    def snapshot_and_restore(self, index: int) -> None:
        cache = self.runner.cache
        snapshot = cache.snapshots.take(self.rows[index])
        cache.free(self.rows[index])
        self.rows[index] = cache.restore(snapshot)
        cache.snapshots.drop(snapshot)

    def step(self, token: int) -> np.ndarray:
        cache = self.runner.cache
        if cache.needs_flush(self.rows):
            cache.flush()
        tokens = mx.array([token + at for at in range(len(self.rows))])
        logits = self.runner.decode(self.rows, tokens)
        mx.eval(logits, cache.arrays())
        return np.array(logits)


class Sides:
    """Rows of one model: first with plain operations, then the same rows with each backend."""

    def __init__(self, name: str, *backends: Backend) -> None:
        model = build(name)[0]
        self.model = model
        self.all = [Side(model, backend) for backend in (None, *backends)]

    def each(self, action: str, *arguments: int) -> None:
        for side in self.all:
            getattr(side, action)(*arguments)

    def step(self, token: int) -> None:
        plain, *others = [side.step(token) for side in self.all]
        assert np.isfinite(plain).all()
        for other in others:
            assert np.isfinite(other).all()
            assert np.abs(other - plain).max() <= 1e-4 * np.abs(plain).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_logits_match_plain_operations_through_joins_leaves_commits_and_levels(name: str) -> None:
    eager, traced = StandIn(), StandIn()
    sides = Sides(name, eager.backend(), traced.backend())
    assert sides.all[2].runner.compile()
    layers = len(sides.model.layers)
    before = eager.launches, traced.launches
    for length in (3, 110, 300):
        sides.each("join", length)
    for step in range(24):
        if step == 8:
            sides.each("lower", 2, 2)
        if step == 20:
            sides.each("leave", 1)
            sides.each("join", 64)
        sides.step(step)

    # Replays of a traced step count as launches.
    assert eager.launches - before[0] == traced.launches - before[1]
    assert eager.attended == 24 * layers
    assert eager.launches - before[0] >= 2 * eager.attended
    compiled = sides.all[2].runner._compiled
    assert compiled is not None
    assert 1 < len(compiled._traces) < 8


@pytest.mark.slow
@pytest.mark.parametrize(("name", "events"), [("qwen3", "flush"), ("gpt_oss", "all")])
def test_the_time_of_flushes_changes_no_bit(name: str, events: str) -> None:
    """Logits stay the same when other rows trigger flushes at any time, and rows are restored."""
    model = build(name)[0]
    calm, hasty = (Side(model, StandIn().backend()) for _ in range(2))
    for side in (calm, hasty):
        for length in (3, 70, 100, 300):
            side.join(length)
    draw = np.random.default_rng(4)
    for step in range(100):
        if draw.random() < 0.1:
            hasty.runner.cache.flush()
            if events == "all":
                hasty.join(int(draw.integers(1, 300)))
                hasty.leave(4)
                hasty.snapshot_and_restore(int(draw.integers(4)))
        assert np.array_equal(calm.step(step % 50), hasty.step(step % 50)), step


def test_compiled_steps_with_too_many_levels_take_plain_operations() -> None:
    kernels = StandIn()
    few = FusedBackend(kernels, most_buffers=7 + 6)
    sides = Sides("qwen3", few)
    assert sides.all[1].runner.compile()
    for length in (200, 300):
        sides.each("join", length)
    sides.step(1)
    counted = kernels.attended
    sides.each("lower", 0, 1)
    sides.step(2)
    assert kernels.attended == counted

    sides.each("lower", 1, 1)
    sides.step(3)
    assert kernels.launches > counted


class Shimmed(Fused):
    """Metal's kernels, compiled and run as C++."""

    def __init__(self) -> None:
        super().__init__(METAL)
        self.texts: set[str] = set()

    def _run(self, launch: Launch) -> list[mx.array]:
        self.launches += 1
        self.texts.add(launch.source)
        return [
            mx.array(out).astype(dtype)
            for out, dtype in zip(run(launch, "metal"), launch.output_dtypes, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no g++ on Linux")
def test_metals_own_kernels_serve_a_model() -> None:
    """Some layers have windows. Rows of different lengths join, step down and leave."""
    kernels = Shimmed()
    sides = Sides("gemma3_text", FusedBackend(kernels, METAL.most_buffers))
    for length in (3, 200):
        sides.each("join", length)
    sides.step(1)
    sides.each("lower", 1, 2)
    sides.each("join", 70)
    sides.step(2)
    sides.each("leave", 0)
    sides.step(3)

    assert kernels.launches >= 3 * 2 * len(sides.model.layers)
    assert len(kernels.texts) > 2
