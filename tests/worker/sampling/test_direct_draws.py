"""A kernel that draws other tokens than MLX's operations, or that fails, is not used."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.attention.kernels import launch
from kvd.worker.attention.kernels.language import CUDA
from kvd.worker.native import build
from kvd.worker.sampling import direct_draws
from kvd.worker.sampling.direct_draws import KernelDraws, LibraryDraws, prepare, prepared

pytestmark = pytest.mark.mlx

VOCABULARY = 731


class Fault:
    """Draws by the native library, with one row or verdict changed, or with an error."""

    def __init__(self, library: ModuleType, kind: str) -> None:
        self._draws, self._kind = LibraryDraws(library), kind

    def draw(self, *given: Any) -> tuple[mx.array, mx.array]:
        if self._kind == "error":
            raise RuntimeError("the kernel does not compile")
        logits, masks, batch, positions = given
        tokens, valid = self._draws.draw(logits.astype(mx.float32), masks, batch, positions)
        last = mx.arange(len(positions)) == len(positions) - 1
        if self._kind == "token" or (self._kind == "masked token" and masks is not None):
            tokens = mx.where(last, (tokens + 1) % VOCABULARY, tokens)
        if self._kind == "valid":  # NaN in one of the rows is not noticed
            valid = mx.where(last, 1, valid)
        if self._kind == "half" and logits.dtype != mx.float32:
            tokens = mx.zeros_like(tokens)
        return tokens, valid


@pytest.mark.parametrize("kind", ["right", "token", "masked token", "valid", "half", "error"])
def test_a_kernel_is_used_only_if_it_is_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    fault = Fault(build.load(), kind)
    monkeypatch.setattr(launch, "find_language", lambda: CUDA)
    monkeypatch.setattr(KernelDraws, "draw", fault.draw)
    monkeypatch.setattr(direct_draws, "_prepared", {})
    prepare(VOCABULARY, mx.bfloat16, None)
    if kind == "right":
        assert prepared(VOCABULARY) == KernelDraws(CUDA, (mx.bfloat16, mx.float32))
    else:
        assert prepared(VOCABULARY) is None


def test_without_kernel_and_library_operations_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_draws, "_prepared", {})
    prepare(VOCABULARY, mx.float32, None)
    assert prepared(VOCABULARY) is None
    assert prepared(VOCABULARY + 1) is None
