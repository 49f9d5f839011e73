"""Attention over pages is tested twice: with MLX's operations, and with the native library's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.worker.cache.backend import Backend
from kvd.worker.native import build
from kvd.worker.native.step import Library
from tests.worker.cache.helpers import Bench


def library() -> Backend | None:
    """Return the native library as a backend, or None without a compiler."""
    return Library(build.load()) if build.compiler() is not None else None


PLAIN_ONLY = ("test_fused", "test_prefill", "test_seam", "test_starts", "test_tiles")
"""Modules whose tests do not use `Bench.backend`, so that they run only once."""


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set the backend of every `Bench`: None for ``plain``, or the native library."""
    chosen: str = getattr(request, "param", "plain")
    Bench.backend = library() if chosen == "native" else None
    if chosen == "native" and Bench.backend is None:
        pytest.skip("no C++ compiler")
    yield chosen
    Bench.backend = None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in PLAIN_ONLY:
        metafunc.parametrize("way", ["plain", "native"], indirect=True)
