"""Attention over pages is tested twice: with MLX's operations, and with the library's."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from kvd.worker.native import build
from tests.cache.helpers import Bench


def library() -> ModuleType | None:
    """The library, if it can be built here; `tests/native` says so where it cannot."""
    try:
        return build.load()
    except build.NotBuiltError:
        return None


@pytest.fixture(autouse=True, params=["plain", "native"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which attention a `Bench` decodes with."""
    Bench.native = library() if request.param == "native" else None
    if request.param == "native" and Bench.native is None:
        pytest.skip("no C++ compiler")
    yield request.param
    Bench.native = None
