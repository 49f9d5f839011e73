"""What MLX compiles at a load on CUDA, with the engine's modules on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from kvd.worker.cache import pool
from kvd.worker.core import builder
from tests.worker import tiny_model
from tests.worker.core.driver import Driver

pytestmark = pytest.mark.mlx


class Stranger(KVCache):
    """A cache of an unknown class."""


@pytest.mark.parametrize("own_caches", [False, True], ids=["pages", "mlx-lm's own caches"])
def test_a_model_loads_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_caches: bool
) -> None:
    written: list[list[mx.Dtype]] = []
    compile_modules = pool.compile_modules

    def noted(dtypes: Any) -> None:
        written.append(list(dtypes))
        compile_modules(written[-1])

    monkeypatch.setattr(pool, "compile_modules", noted)
    monkeypatch.setattr(builder, "on_cuda", lambda: True)
    folder = tiny_model.save(tmp_path / "tiny")
    if own_caches:
        caches = lambda model: [Stranger() for _ in model.layers]  # noqa: E731
        qwen3 = importlib.import_module("mlx_lm.models.qwen3")
        monkeypatch.setattr(qwen3.Model, "make_cache", caches, raising=False)
    driver = Driver(str(folder))
    assert len(driver.alone([5, 6, 7], max_tokens=3).tokens) == 3

    dtypes = {dtype for some in written for dtype in some}
    assert dtypes == (set() if own_caches else {mx.float32, mx.uint32})
