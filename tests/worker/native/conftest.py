"""The native library, built on this machine. Without a compiler, its tests are skipped."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvd.worker.native import build


@pytest.fixture(scope="session")
def library() -> ModuleType:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    return build.load()
