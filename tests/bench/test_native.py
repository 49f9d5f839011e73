"""`bench/native`: a small run against the same library, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import native
from kvd.worker.native import build

pytestmark = pytest.mark.mlx


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_products_are_compared_with_the_peak(tmp_path: Path) -> None:
    file = tmp_path / "native.json"
    native.main([
        "--rows", "1", "8", "--sizes", "32x48", "--runs", "1", "--json", str(file), "--against",
        str(build.library()),
    ])  # fmt: skip

    result = json.loads(file.read_text())
    assert result["peak_per_second"] > 1e9
    assert [one["rows"] for one in result["products"]] == [1, 8]
    assert all(one["of_peak"] > 0 and one["ratio"] > 0 for one in result["products"])
