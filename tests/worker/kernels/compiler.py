"""NVRTC without a GPU: the library of the package nvidia-cuda-nvrtc, if it is installed."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest

from kvd.worker.artifacts.nvrtc import LIBRARIES, Nvrtc


@cache
def find() -> Nvrtc | None:
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            if path.name in LIBRARIES:
                return Nvrtc(path)
    return None


def require() -> Nvrtc:
    if (found := find()) is None:
        pytest.skip("needs NVRTC: install nvidia-cuda-nvrtc, which works without a GPU")
    return found
