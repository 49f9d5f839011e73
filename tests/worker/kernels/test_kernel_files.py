"""The files with the text of CUDA kernels, their permissions, and the lines that include them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.attention.kernels import kernel_files
from kvd.worker.gpu import products

pytestmark = pytest.mark.mlx
BODY = "const int rows = x_shape[0];\nout[0] = w_strides[0] + long_w_ndim + rows;\n"
HEADER = "#define TWO 2\n"


@dataclass
class KernelRecorder:
    """Replaces `mx.fast.cuda_kernel` and records its arguments."""

    kernels: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, **given: Any) -> Any:
        self.kernels.append(given)
        return lambda **launch: [mx.zeros(shape) for shape in launch["output_shapes"]]

    @property
    def texts(self) -> tuple[str, str]:
        """Source and header of the last kernel."""
        return self.kernels[-1]["source"], self.kernels[-1]["header"]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> KernelRecorder:
    kernel_files._log_once.cache_clear()
    recorder = KernelRecorder()
    monkeypatch.setattr(mx.fast, "cuda_kernel", recorder)
    return recorder


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "kernels"
    monkeypatch.setattr(kernel_files, "folder", lambda: folder)
    return folder


def make(source: str = BODY, header: str = HEADER) -> None:
    kernel_files.CudaKernel("k", ["x", "w", "long_w"], ["out"], source, header)


def included(text: str) -> Path:
    """Return the file that a text's first line includes."""
    front, path, end = text.partition("\n")[0].split('"')
    assert (front, end) == ("#include ", "")
    return Path(path)


def test_files_hold_the_text_and_mlx_gets_lines_that_include_them(
    recorder: KernelRecorder, folder: Path
) -> None:
    make()

    source, header = recorder.texts
    assert included(source).read_text() == BODY
    assert included(header).read_text() == HEADER
    assert {included(text).parent for text in recorder.texts} == {folder}
    assert header.count("\n") == 1
    # Names that MLX would find in the text as substrings.
    assert source.split("\n")[1:] == ["// x_shape w_strides w_ndim long_w_ndim", ""]
    assert len(source) < 400
    given = recorder.kernels[0]
    assert (given["name"], given["input_names"]) == ("k", ["x", "w", "long_w"])
    assert given["output_names"] == ["out"]


def test_files_belong_to_the_user_only(recorder: KernelRecorder, folder: Path) -> None:
    before = os.umask(0)
    try:
        make()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 2


def test_each_text_has_its_own_file_which_is_written_once(
    recorder: KernelRecorder, folder: Path
) -> None:
    make()
    first = {path: path.stat().st_ino for path in folder.iterdir()}
    make()
    assert recorder.kernels[0] == recorder.kernels[1]
    assert {path: path.stat().st_ino for path in folder.iterdir()} == first  # nothing was written
    make(BODY + "\n")
    assert recorder.texts[1] == recorder.kernels[0]["header"]
    assert len({kernel["source"] for kernel in recorder.kernels}) == 2


def test_another_process_has_the_same_files(tmp_path: Path) -> None:
    """Workers leave the files behind, and other processes use them."""
    code = (
        "import mlx.core as mx\n"
        "mx.fast.cuda_kernel = lambda **given: print(given)\n"
        "from kvd.worker.attention.kernels import kernel_files\n"
        f"kernel_files.CudaKernel('k', ['x'], ['out'], {BODY!r}, {HEADER!r})"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    )
    assert first == second
    assert f'#include "{tmp_path}' in first
    assert len(list(tmp_path.rglob("*.inc"))) == 2


@pytest.mark.parametrize("end", ["cut", "gone", "all gone"])
def test_a_changed_file_is_written_again(recorder: KernelRecorder, folder: Path, end: str) -> None:
    make()
    source = included(recorder.texts[0])
    if end == "cut":
        source.write_text(BODY[:-5])
    else:
        source.unlink()
    if end == "all gone":
        included(recorder.texts[1]).unlink()
        folder.rmdir()
    make()
    assert source.read_text() == BODY
    assert included(recorder.texts[1]).read_text() == HEADER


def test_files_are_verified_for_each_template_that_mlx_compiles(
    recorder: KernelRecorder, folder: Path
) -> None:
    weight = mx.zeros((32, 64), mx.bfloat16)
    products._kernel.cache_clear()
    products.multiply(mx.zeros((1, 1, 64), mx.bfloat16), weight, (32,))
    for path in folder.iterdir():
        path.unlink()
    products.multiply(mx.zeros((8, 1, 64), mx.bfloat16), weight, (32,))
    assert list(folder.iterdir()) == []  # this template was compiled before
    products.multiply(mx.zeros((9, 1, 64), mx.bfloat16), weight, (32,))
    assert len(list(folder.iterdir())) == 2
    products._kernel.cache_clear()  # the cached kernels are fakes


@pytest.mark.parametrize(
    "why",
    ["no folder", "folder open to others", "parent folder open to others", "file open to others"],
)
def test_without_a_file_mlx_gets_the_text(
    why: str, recorder: KernelRecorder, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "no folder":
        folder.parent.mkdir()
        folder.write_text("")
    else:
        make()
    if why == "folder open to others":
        folder.chmod(0o777)
    if why == "parent folder open to others":
        folder.parent.chmod(0o777)
    if why == "file open to others":
        included(recorder.texts[0]).chmod(0o666)

    with caplog.at_level(logging.INFO):
        for _ in range(3):
            make()

    assert recorder.texts == (BODY, HEADER)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert str(folder.parent) in caplog.text


def test_without_a_home_mlx_gets_the_text(
    recorder: KernelRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(kernel_files, "folder", homeless)
    make()
    assert recorder.texts == (BODY, HEADER)


def test_mlx_gets_the_text_if_the_folders_name_breaks_the_line(
    recorder: KernelRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_files, "folder", lambda: tmp_path / 'a"b')
    make()
    assert recorder.texts == (BODY, HEADER)
    assert list(tmp_path.iterdir()) == []
