"""Compiled decode steps equal plain ones to the bit, however the batch changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.cache.backend import Backend
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.padded_sizes import padded_work
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.cache.step_down import ModelStepDown
from kvd.worker.native import build as build_native
from kvd.worker.native.step import Library
from kvd.worker.serving import compiled
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Runner
from tests.worker.architectures.zoo import build

pytestmark = pytest.mark.mlx
SCHEMES = (Scheme(8, 8), Scheme(4, 4))


class Pair:
    """Identical rows over two caches, one of which runs compiled steps."""

    def __init__(self, name: str, settings: CacheSettings, backend: Backend | None = None) -> None:
        model = build(name)[0]
        layout = find_layout(model)
        self.plain, self.compiled = (Runner(model, ModelCache(layout, settings)) for _ in range(2))
        for runner in self.runners:
            runner.cache.use(page_product, backend)
        assert self.compiled.compile()
        self.rows: list[tuple[object, object]] = []

    @property
    def runners(self) -> tuple[Runner, Runner]:
        return self.plain, self.compiled

    def join(self, length: int) -> None:
        rows = tuple(runner.cache.new_row() for runner in self.runners)
        for runner, row in zip(self.runners, rows, strict=True):
            for start in range(0, length, 64):
                runner.prefill(row, [5 + at % 50 for at in range(start, min(start + 64, length))])
        self.rows.append(rows)

    def leave(self, index: int) -> None:
        for runner, row in zip(self.runners, self.rows.pop(index), strict=True):
            runner.cache.free(row)

    def step(self, token: int) -> None:
        found = []
        for side, runner in enumerate(self.runners):
            rows = [pair[side] for pair in self.rows]
            if runner.cache.needs_flush(rows):
                runner.cache.flush()
            logits = runner.decode(rows, mx.array([token + at for at in range(len(rows))]))
            mx.eval(logits, runner.cache.arrays())
            found.append(np.array(logits))
        assert np.isfinite(found[0]).all()
        np.testing.assert_array_equal(found[0], found[1])


@pytest.fixture(params=["plain", "native"])
def library(request: pytest.FixtureRequest) -> Backend | None:
    if request.param == "native" and build_native.compiler() is None:
        pytest.skip("no C++ compiler")
    return Library(build_native.load()) if request.param == "native" else None


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_logits_are_the_same_to_the_bit_through_joins_leaves_commits_and_flushes(
    name: str, library: Backend | None
) -> None:
    pair = Pair(name, CacheSettings(SCHEMES), library)
    for length in (3, 70, 150):
        pair.join(length)
    for step in range(66):
        if step == 20:
            pair.join(64)
        if step == 44:
            pair.leave(1)
        pair.step(step % 40)

    assert pair.compiled.compiled
    assert pair.compiled._compiled is not None
    assert 1 < len(pair.compiled._compiled._traces) < 40


def test_rows_on_several_levels(library: Backend | None) -> None:
    pair = Pair("llama", CacheSettings(SCHEMES), library)
    for length in (200, 300):
        pair.join(length)
    pair.step(1)
    for side, runner in enumerate(pair.runners):
        ModelStepDown(runner.cache, [pair.rows[0][side]], 1).advance(1e9, lambda: 0.0)
    for step in range(10):
        pair.step(step)


def test_padded_work_has_few_shapes_and_little_padding() -> None:
    sizes = {padded_work(pages) for pages in range(1, 4097)}
    assert len(sizes) <= 4 * 12
    for pages in range(1, 4097):
        assert pages <= padded_work(pages) <= max(pages + 1, 1.25 * pages)
    assert padded_work(0) == 0


def test_traces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_TRACES", 2)
    pair = Pair("llama", CacheSettings(SCHEMES))
    for length in (10, 20, 30):
        pair.join(length)
        pair.step(1)
    for _ in range(2):
        pair.leave(0)
        pair.step(1)

    assert pair.compiled._compiled is not None
    assert len(pair.compiled._compiled._traces) == 2


def test_larger_pools_need_no_new_trace_if_steps_read_views(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with kernels on CUDA: kvd's native library reads only the addresses of pools, too."""
    if build_native.compiler() is None:
        pytest.skip("no C++ compiler")
    resized: list[int] = []

    all_pages = PagePool.views

    def first_pages(pool: PagePool) -> list[mx.array]:
        with monkeypatch.context() as patch:
            patch.setattr(PagePool, "is_written_by_kernel", True)
            return all_pages(pool)

    def counts(views: Callable[[PagePool], list[mx.array]]) -> list[int]:
        monkeypatch.setattr(PagePool, "views", views)
        pair = Pair("llama", CacheSettings(SCHEMES), Library(build_native.load()))
        decode = pair.compiled._compiled
        assert decode is not None
        pool = pair.compiled.cache.stores[0].layers[0].pools[0]
        found = []
        for length in (70, 150):
            pair.join(length)
        for token in range(150):
            before = len(decode._traces)
            capacity = pool.capacity
            pair.step(token % 50)
            if pool.capacity == capacity and token % 10 == 0:
                for store in chain.from_iterable(one.cache.stores for one in pair.runners):
                    for layer in store.layers:
                        layer.pools[0].grow(layer.pools[0].capacity + 3)
                resized.append(pool.capacity)
            found.append(len(decode._traces) - before)
        return found

    with_views, without = counts(first_pages), counts(all_pages)
    assert len(resized) > 20
    assert sum(with_views) < 5
    assert sum(without) >= len(resized) // 2


def test_steps_without_kernels_read_whole_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """They gather pages from the arrays, so a view of the first page is not enough."""
    monkeypatch.setattr(PagePool, "views", lambda pool: [array[:1] for array in pool.arrays()])
    pair = Pair("llama", CacheSettings(SCHEMES))
    for length in (70, 150, 300):
        pair.join(length)
    for token in range(3):
        pair.step(token)


def test_models_that_cannot_be_traced_run_plainly() -> None:
    model = build("mamba2")[0]
    runner = Runner(model, ModelCache(find_layout(model), CacheSettings(SCHEMES)))
    assert not runner.compile()
    assert not runner.compiled


def test_a_trace_that_gives_wrong_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")[0]
    runner = Runner(model, ModelCache(find_layout(model), CacheSettings(SCHEMES)))
    right = compiled.CompiledDecode.__call__
    monkeypatch.setattr(
        compiled.CompiledDecode, "__call__", lambda self, tokens: right(self, tokens) * 1.01
    )

    assert not runner.compile()
    assert runner.cache.nbytes == 0
