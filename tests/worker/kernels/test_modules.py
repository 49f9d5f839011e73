"""Modules of CUDA kernels: both texts, the compiler, and the files for MLX."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.artifacts import cuda_text, modules
from kvd.worker.artifacts.cuda_text import Argument, KernelText
from kvd.worker.artifacts.entries import Entries
from kvd.worker.artifacts.modules import Modules
from kvd.worker.artifacts.nvrtc import CompileError, Nvrtc
from kvd.worker.attention.kernels import kernel_files, launch
from kvd.worker.attention.kernels.arguments import Attend, Heads, Tiling
from kvd.worker.attention.kernels.attend import COLUMNS
from kvd.worker.attention.kernels.fused import Fused
from kvd.worker.attention.kernels.kernel_files import CudaKernel
from kvd.worker.attention.kernels.language import CUDA
from kvd.worker.attention.kernels.launch import Launch, append_launch, rotate_launch
from kvd.worker.attention.kernels.launch_prefill import attend_launch
from kvd.worker.cache import device_copy
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.engine import ReportProgress
from kvd.worker.gpu import products
from kvd.worker.grammar.mask_memory import copy_launch
from kvd.worker.sampling.draw_kernel import draw_launch
from tests.worker.kernels import cases, compiler
from tests.worker.kernels.decoding import Step
from tests.worker.kernels.test_append import given as given_append
from tests.worker.kernels.test_rotate import CASES
from tests.worker.kernels.test_rotate import given as given_rotate

pytestmark = pytest.mark.mlx

SMALL = KernelText(
    name="kk",
    inputs=(
        Argument("x", mx.float32),
        Argument("b", mx.bfloat16),
        Argument("s", mx.int32, scalar=True),
    ),
    outputs=(Argument("out", mx.float16), Argument("out2", mx.float32)),
    template=(
        ("T", mx.bfloat16),
        ("K", 8),
        ("F", True),
        ("H", mx.float16),
        ("U", mx.uint32),
        ("B", mx.uint8),
        ("I", mx.int64),
    ),
    source="out[0] = x[0];\n",
    header="#define A 1\n",
    mlx_source="// x_shape b_strides x_ndim\nout[0]=x[0];\n",
    mlx_header="#define A 1\n",
)
MLX_TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define A 1
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_kk_bfloat16_t_8_t_float16_t_uint32_t_uint8_t_int64_t(
    const float* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ int x_ndim,
    const __nv_bfloat16* b,
    const __grid_constant__ Strides b_strides,
    const int32_t* s,
    __half* out,
    float* out2) {
  using T = __nv_bfloat16;
  constexpr int K = 8;
  constexpr bool F = true;
  using H = __half;
  using U = uint32_t;
  using B = uint8_t;
  using I = int64_t;

// x_shape b_strides x_ndim
out[0]=x[0];

}

} // namespace mlx::core::cu
"""
"""The text that MLX 0.32.4 prints for `SMALL` with ``verbose=True``."""


def compile_fake(text: str) -> bytes:
    return b"module of " + hashlib.sha256(text.encode()).digest()


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> bytes:
        self.texts.append(text)
        return compile_fake(text)


def silent(_stage: str, _fraction: float) -> None:
    """Report no progress."""


def make(
    tmp_path: Path,
    compile_text: Callable[[str], bytes],
    key: str = "sm_90",
    progress: ReportProgress = silent,
) -> Modules:
    folder = modules.process_folder(tmp_path / "kvd" / "modules")
    stored = Entries(tmp_path / "kvd" / "store", 1 << 20)
    return Modules(compile_text, key, stored, folder, progress)


def files(found: Modules) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in found.folder.iterdir() if path.suffix}


def test_the_module_is_named_by_a_hash_of_the_text_that_mlx_compiles() -> None:
    assert SMALL.mlx_text == MLX_TEXT
    assert cuda_text._hash(b"kvd") == 0xDE41907309835892  # std::hash of libstdc++
    assert SMALL.module == f"{SMALL.symbol}_{cuda_text._hash(MLX_TEXT.encode()):x}"
    assert SMALL.kernel == f"mlx::core::cu::{SMALL.symbol}"


def test_both_texts_have_the_same_signature() -> None:
    for text in (SMALL, replace(SMALL, mlx_source="out[0]=x[0];\n")):
        signature = text.mlx_text.partition("__global__")[2].partition("{")[0]
        assert f'extern "C" __global__{signature}{{' in text.own_text


def test_a_module_is_compiled_once_and_placed_for_mlx_in_every_process(tmp_path: Path) -> None:
    compiler = Compiler()
    first, second = make(tmp_path, compiler), make(tmp_path, compiler)
    for found in (first, second):
        found.provide(SMALL)
        found.provide(SMALL)
        assert files(found) == {
            f"{SMALL.module}.ptx": compile_fake(SMALL.own_text),
            f"{SMALL.module}.txt": f"{SMALL.kernel}\t{SMALL.symbol}\n".encode(),
        }
    assert compiler.texts == [SMALL.own_text]
    assert (first.compiled, second.compiled) == (1, 0)
    make(tmp_path, compiler, "sm_100").provide(SMALL)
    assert len(compiler.texts) == 2


def test_kernels_are_compiled_ahead_in_threads(tmp_path: Path) -> None:
    held, reports = threading.Event(), []

    def compile_held(text: str) -> bytes:
        held.wait()
        return compile_fake(text)

    def report(stage: str, fraction: float) -> None:
        reports.append((stage, fraction))
        held.set()

    found = make(tmp_path, compile_held, progress=report)
    texts = [replace(SMALL, name=f"k{number}") for number in range(20)]
    with found.ahead(0.8):
        for text in (*texts, *texts):
            found.provide(text)
    assert {f"{text.module}.ptx" for text in texts} == {
        name for name in files(found) if name.endswith(".ptx")
    }
    assert reports[0] == ("compiling 0 of 20", 0.8)
    assert found.compiled == 20


def test_a_kernel_that_cannot_be_compiled_is_left_to_mlx(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_text: str) -> bytes:
        raise CompileError("no such word")

    found, other = make(tmp_path, refuse), replace(SMALL, name="other")
    assert not found.provide(SMALL)
    with found.ahead(0.8):
        found.provide(other)
    assert not found.provide(other)
    assert files(found) == {}
    assert caplog.text.count("no such word") == 2


@pytest.mark.usefixtures("device")
def test_a_kernel_that_mlx_cannot_compile_is_used_only_with_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, heads = Fused(CUDA), Heads(mx.bfloat16, 4, 2, 128, 64, 0.25)
    warps, warpgroups = Tiling(32, False, 2), Tiling(64, True, 2)
    assert kernels.tiling(heads) == warps
    monkeypatch.setattr(modules, "_current", found := make(tmp_path, Compiler()))
    assert kernels.tiling(heads) == warps
    found.architecture = "sm_90a"
    assert kernels.tiling(heads) == warpgroups
    shutil.rmtree(found.folder)
    found.folder.write_text("a file where modules should be")
    assert kernels.tiling(heads) == warpgroups
    assert kernels.tiling(replace(heads, scale=0.5)) == warps


def test_modules_of_mlxs_own_operations_are_kept(tmp_path: Path) -> None:
    first = make(tmp_path, Compiler())
    first.provide(SMALL)
    (first.folder / "gather.ptx").write_bytes(b"mo\0dule")
    (first.folder / "gather.txt").write_bytes(b"a\tb\n")
    (first.folder / "long").mkdir()
    (first.folder / "long" / "name.ptx").write_bytes(b"long")
    (first.folder / "long" / "name.txt").write_bytes(b"c\td\n")
    (first.folder / "lost.ptx").write_bytes(b"no names")
    first.keep()

    second = make(tmp_path, Compiler())
    second.restore()
    assert files(second) == {"gather.ptx": b"mo\0dule", "gather.txt": b"a\tb\n"}
    assert (second.folder / "long" / "name.ptx").read_bytes() == b"long"
    second.keep()
    assert len(first._stored.names()) == 3  # nothing is stored twice
    third = make(tmp_path, Compiler(), "sm_100")
    third.restore()
    assert files(third) == {}


def test_a_damaged_module_is_compiled_again(tmp_path: Path) -> None:
    compiler = Compiler()
    first = make(tmp_path, compiler)
    first.provide(SMALL)
    (name,) = first._stored.names()
    (first._stored.folder / name).write_bytes(b"damaged")
    second = make(tmp_path, compiler)
    second.provide(SMALL)
    assert files(second) == files(first)
    assert len(compiler.texts) == 2


def test_folders_of_ended_processes_are_deleted(tmp_path: Path) -> None:
    root = tmp_path / "kvd" / "modules"
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from kvd.worker.artifacts.modules import process_folder\n"
        "print(process_folder(Path(sys.argv[1])), flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        other = Path(process.stdout.readline().strip())
        mine = modules.process_folder(root)
        assert {path.name for path in (root / "running").iterdir()} == {mine.name, other.name}
        process.kill()
    last = modules.process_folder(root)
    assert {path.name for path in (root / "running").iterdir()} == {mine.name, last.name}
    assert last.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_process_is_creating_is_kept(tmp_path: Path) -> None:
    running = tmp_path / "kvd" / "modules" / "running"
    running.mkdir(parents=True, mode=0o700)
    for path in (tmp_path / "kvd", tmp_path / "kvd" / "modules"):
        path.chmod(0o700)
    (running / ".new").mkdir()
    (running / ".old").mkdir()
    os.utime(running / ".old", (0, 0))
    modules.process_folder(running.parent)
    assert (running / ".new").exists()
    assert not (running / ".old").exists()


def test_without_cuda_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(modules.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    modules.activate(silent)
    assert modules.current() is None
    assert modules.FOLDER_VARIABLE not in os.environ


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """MLX with a CUDA device, and with kernels that do nothing."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    about = {"compute_capability_major": 9, "compute_capability_minor": 0}
    monkeypatch.setattr(mx, "device_info", lambda: about)
    monkeypatch.setattr(modules, "_current", None)
    monkeypatch.setattr(modules, "cache_folder", lambda name: tmp_path / "kvd" / name)
    monkeypatch.setattr(kernel_files, "folder", lambda: tmp_path / "kvd" / "kernels")
    monkeypatch.setattr(
        mx.fast,
        "cuda_kernel",
        lambda **_: (
            lambda **given: [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(given["output_shapes"], given["output_dtypes"], strict=True)
            ]
        ),
    )
    launch._kernel.cache_clear()
    products._kernel.cache_clear()
    monkeypatch.setenv(modules.FOLDER_VARIABLE, "unset")  # restored after the test
    monkeypatch.delenv(modules.FOLDER_VARIABLE)
    yield
    launch._kernel.cache_clear()  # the cached kernels are fakes
    products._kernel.cache_clear()


@pytest.mark.usefixtures("device")
def test_a_launch_compiles_its_kernel_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = compiler.require()
    monkeypatch.setattr(Nvrtc, "loaded", lambda: nvrtc)
    modules.activate(silent)
    found = modules.current()
    assert found is not None
    assert os.environ[modules.FOLDER_VARIABLE] == str(found.folder)
    given = given_append(mx.bfloat16, [7, -1, 100], [1, 0, 0])
    launch.run(append_launch(CUDA, given), CUDA)
    (module,) = (path for path in found.folder.iterdir() if path.suffix == ".ptx")
    assert module.read_bytes().startswith(b"\x7fELF")
    kernel, symbol = module.with_suffix(".txt").read_text().strip().split("\t")
    assert kernel == f"mlx::core::cu::{symbol}"
    assert symbol.encode() in module.read_bytes()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("why", ["the user's own folder", "no NVRTC", "an old device"])
def test_mlx_compiles_where_kvd_cannot(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvrtc, "loaded", lambda: None if why == "no NVRTC" else object())
    if why == "the user's own folder":
        monkeypatch.setenv(modules.FOLDER_VARIABLE, "/mine")
    if why == "an old device":
        about = {"compute_capability_major": 7, "compute_capability_minor": 5}
        monkeypatch.setattr(mx, "device_info", lambda: about)
    before = os.environ.get(modules.FOLDER_VARIABLE)
    modules.activate(silent)
    assert modules.current() is None
    assert os.environ.get(modules.FOLDER_VARIABLE) == before


def text_of(one: Launch) -> KernelText:
    made = CudaKernel(one.name, one.input_names, one.output_names, one.source, one.header)
    return made.text(one.inputs, list(one.template), one.output_dtypes)


def launches() -> dict[str, Launch]:
    found = {}
    for number, values in enumerate(cases.values_of(10)):
        step = Step(cases.case_of(values, number))
        found[f"split {number}"] = step.split("cuda")
        (shape,) = step.split("cuda").output_shapes
        found[f"combine {number}"] = step.combine("cuda", mx.zeros(shape))
    for case in (*cases.MATRIX[:2], *cases.MATRIX[5:7]):
        found[f"matrix {case.name}"] = Step(case).split("cuda")
    for dtype in (mx.float32, mx.bfloat16):
        given = given_append(dtype, [7, -1, 100], [1, 0, 0])
        found[f"append {dtype}"] = append_launch(CUDA, given)
        settings, keys = mx.zeros((2, 4)), mx.zeros((2, 2), mx.uint32)
        for masks in (None, mx.zeros((2, 4), mx.uint32)):
            one = draw_launch(CUDA, mx.zeros((2, 100), dtype), masks, settings, keys)
            found[f"draw {dtype} {masks is None}"] = one
    for name, case in CASES.items():
        found[f"rotate {name}"] = rotate_launch(CUDA, given_rotate(*case))
    found["copy of masks"] = copy_launch(mx.zeros((2,), mx.uint64), 2, 16)
    return found


@pytest.mark.usefixtures("device")
def test_nvrtc_compiles_every_kind_of_launch() -> None:
    nvrtc = compiler.require()
    for name, one in launches().items():
        text = text_of(one)
        module = nvrtc.compile(text.own_text, "sm_90")
        assert module.startswith(b"\x7fELF"), name
        assert text.symbol.encode() in module, name


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_nvrtc_compiles_the_products(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc, texts = compiler.require(), []

    class Recorder:
        def provide(self, text: KernelText) -> None:
            texts.append(text)

    monkeypatch.setattr(modules, "_current", Recorder())
    norm = products.Norm(mx.ones((64,), dtype), 1e-6)
    x, weight, bias = (mx.zeros(shape, dtype) for shape in ((9, 1, 64), (64, 64), (64,)))
    given: list[dict[str, Any]] = [{}, {"norm": norm, "bias": bias}, {"residual": x}]
    for one in given:
        products.multiply(x, weight, [64], **one)
    products.multiply(x, weight, [16, 48])
    products.multiply_gated(x, weight, norm)
    assert len(texts) == 5
    for text in texts:
        assert text.symbol.encode() in nvrtc.compile(text.own_text, "sm_90")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("warpgroups", [False, True], ids=["warps", "warpgroups"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_nvrtc_compiles_the_kernel_for_chunks(dtype: mx.Dtype, warpgroups: bool) -> None:
    nvrtc = compiler.require()
    vectors, heads = mx.zeros((8, 4, 128), dtype), mx.zeros((8, 2, 128), dtype)
    tiles, ready = mx.zeros((1, COLUMNS), mx.int32), mx.zeros((1,), mx.int32)
    given = Attend(vectors, *[heads] * 4, ready, tiles, None, 8, 0.1, warpgroups)
    text = text_of(attend_launch(CUDA, given))
    assert text.symbol.encode() in nvrtc.compile(text.own_text, "sm_90a" if warpgroups else "sm_80")


@pytest.mark.usefixtures("device")
def test_the_copy_of_pages_is_compiled_as_the_other_kernels_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[KernelText] = []
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(modules, "_current", SimpleNamespace(provide=texts.append))
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **about: given.append(about))
    pool = PagePool(LayerGeometry(2, 64, 64), Scheme(8, 16), mx.bfloat16)
    pool.grow(1)
    device_copy._kernel.__wrapped__(device_copy.PageShape.of(pool.arrays()))

    (text,), (about,) = texts, given
    assert text.name == about["name"]
    assert (text.mlx_source, text.mlx_header) == (about["source"], about.get("header", ""))
    assert [one.name for one in text.inputs] == about["input_names"]
    dtypes = [one.dtype for one in text.inputs]
    assert dtypes == [mx.uint64, mx.int32, mx.uint32, mx.bfloat16, mx.bfloat16, mx.bfloat16]
    nvrtc = compiler.require()
    assert text.symbol.encode() in nvrtc.compile(text.own_text, "sm_90")


def test_a_text_with_an_error_is_refused_with_the_compilers_message() -> None:
    with pytest.raises(CompileError, match="unknown_word"):
        compiler.require().compile("__global__ void f() { unknown_word; }", "sm_90")
