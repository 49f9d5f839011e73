"""Kernels run as C++ here; without a compiler these tests are skipped."""

from __future__ import annotations

import pytest

from tests.worker.kernels import build
from tests.worker.kernels.wrap import Language


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if build.compiler() is None:
        pytest.skip("no g++ on Linux: kernels cannot run without a GPU here")


@pytest.fixture(params=["metal", "cuda"])
def language(request: pytest.FixtureRequest) -> Language:
    return request.param
