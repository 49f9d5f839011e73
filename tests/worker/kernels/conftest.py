"""These tests run kernels as C++ on the CPU. Without a compiler they are skipped."""

from __future__ import annotations

import pytest

from tests.worker.kernels import build
from tests.worker.kernels.wrap import Language


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if build.compiler() is None:
        pytest.skip("running kernels without a GPU needs g++ on Linux")


@pytest.fixture(params=["metal", "cuda"])
def language(request: pytest.FixtureRequest) -> Language:
    return request.param
