"""Loops for processors without AVX-512, and without AVX2, give the bits of this processor's own."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.worker.native import build

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("portable.cpp")
TARGETS = {"own": [], "avx2": ["-mno-avx512f"], "generic": ["-march=x86-64"]}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """Return a function that compiles the loops for one of `TARGETS`, once."""
    if build.compiler() is None or platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler for x86_64")
    folder = tmp_path_factory.mktemp("portable")

    @cache
    def compiled(target: str) -> ctypes.CDLL:
        found = folder / f"{target}.so"
        flags = [flag for flag in build._FLAGS if flag not in ("-O3", "-fvisibility=hidden")]
        command = [str(build.compiler()), "-O0", *flags, *TARGETS[target], f"-I{build.SOURCES}"]
        command += ["-Wno-psabi", "-pthread", "-shared", str(PROGRAM), "-o", str(found)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(found))
        library.use_threads(2)
        return library

    return compiled


def pointers(*arrays: Any) -> list[Any]:
    return [
        one.ctypes.data_as(ctypes.c_void_p) if isinstance(one, np.ndarray) else one
        for one in arrays
    ]


@pytest.mark.parametrize("target", ["avx2", "generic"])
@pytest.mark.parametrize(
    ("k_dim", "v_dim", "repeats", "bits"),
    [
        (64, 64, 2, (8, 8)),
        (64, 64, 1, (2, 3)),
        (64, 64, 1, (3, 5)),
        (64, 64, 1, (5, 4)),
        (64, 64, 1, (6, 6)),
        (128, 80, 1, (8, 8)),
        (40, 24, 5, (8, 8)),
    ],
)
def test_attention(
    built: Callable[[str], ctypes.CDLL],
    target: str,
    k_dim: int,
    v_dim: int,
    repeats: int,
    bits: tuple[int, int],
) -> None:
    rng = np.random.default_rng(k_dim)
    kv_heads, count, dims = 2, 75, (k_dim, v_dim)
    pages = 0 if v_dim % 64 else 3  # a page's values have whole groups
    codes = [
        rng.integers(0, 256, (pages, kv_heads, 8 * dim * one)).astype(np.uint8)
        for dim, one in zip(dims, bits, strict=True)
    ]
    groups = [
        rng.normal(size=(pages, kv_heads, dim)).astype(np.float32) * 0.01
        for dim in dims
        for _ in range(2)
    ]
    about = np.array([[0, page, 64 * page] for page in range(pages)], np.int32)
    queries = rng.normal(size=(kv_heads * repeats, count, k_dim)).astype(np.float32)
    dense = [rng.normal(size=(kv_heads, count, dim)).astype(np.float32) for dim in dims]
    lows = np.maximum(0, np.arange(count) + pages * 64 - 90).astype(np.int32)
    outputs = []
    for name in ("own", target):
        y = np.full((kv_heads * repeats, count, v_dim), np.nan, np.float32)
        held = (ctypes.c_void_p * 4)(*(one.ctypes.data for one in groups))
        shape = (*bits, kv_heads * repeats, kv_heads, k_dim, v_dim, pages, count)
        arrays = pointers(about, *codes, held, queries, *dense, lows, 5, y)
        built(name).attend(*shape, *arrays)
        outputs.append(y)

    assert np.isfinite(outputs[0]).all()
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("target", ["avx2", "generic"])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 16), (3, 40), (7, 272), (30, 100)])
def test_products(
    built: Callable[[str], ctypes.CDLL], target: str, rows: int, outputs: int
) -> None:
    rng = np.random.default_rng(rows)
    inputs, panels = 37, -(-outputs // 16)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    packed = rng.normal(size=(panels, inputs, 16)).astype(np.float16)
    bias = rng.normal(size=outputs).astype(np.float32)
    found = []
    for name in ("own", target):
        y = np.full((rows, outputs), np.nan, np.float32)
        built(name).multiply(*pointers(x, rows, inputs, packed, bias, outputs, y))
        found.append(y)

    weight = packed.astype(np.float64).swapaxes(1, 2).reshape(panels * 16, inputs)[:outputs]
    np.testing.assert_allclose(found[0], x @ weight.T + bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(*found)
