"""MLX's calls of the compiler use the precompiled header."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tools.compile_ahead import FLAGS, HEADER, precompile

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux"
)


@pytest.mark.slow
def test_mlx_compiles_with_the_precompiled_header(tmp_path: Path) -> None:
    precompiled = precompile(HEADER)
    if precompiled is None:
        pytest.skip("this MLX has no header for operations on a CPU")
    call = f"g++ {' '.join(FLAGS)} -shared".encode()
    libraries = (Path(str(mx.__file__)).parent / "lib").glob("libmlx.so*")
    assert any(call in path.read_bytes() for path in libraries)

    source = tmp_path / "operation.cpp"
    source.write_text('#include "mlx/backend/cpu/compiled_preamble.h"\n')
    include = HEADER.parents[3]
    done = subprocess.run(
        ["g++", *FLAGS, "-shared", "-H", f"-I{include}", source, "-o", tmp_path / "operation.so"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"! {precompiled}" in done.stderr.splitlines()

    written = precompiled.stat().st_mtime_ns
    assert precompile(HEADER) == precompiled
    assert precompiled.stat().st_mtime_ns == written


def test_a_header_that_was_installed_later_is_compiled_again(tmp_path: Path) -> None:
    """uv keeps the time of its cache, which may be older than what an earlier header became."""
    header = tmp_path / "include" / "some.h"
    header.parent.mkdir()
    header.write_text("int old();\n")
    old = precompile(header)
    assert old is not None
    content = old.read_bytes()
    header.unlink()
    header.write_text("int another();\n")
    os.utime(header, (1e9, 1e9))
    assert precompile(header) == old
    assert old.read_bytes() != content
