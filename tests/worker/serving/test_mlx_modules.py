"""Modules of MLX's own operations that other processes compile during a load."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.artifacts import modules
from kvd.worker.serving import mlx_modules
from kvd.worker.serving.mlx_modules import Helper
from tests.worker.kernels.test_modules import Compiler, make

pytestmark = pytest.mark.mlx

COMPILING = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
print(folder, flush=True)
(folder / "half.ptx").write_bytes(b"no names of functions yet")
for name in ("gather", "deep/scatter"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / f"{name}.ptx").write_bytes(name.encode())
    (folder / f"{name}.txt").write_bytes(b"a function of " + name.encode())
    print("done", flush=True)
{after}
"""
END = 'print("end", flush=True); sys.stdin.read()'


@pytest.fixture
def found(tmp_path: Path) -> modules.Modules:
    return make(tmp_path, Compiler())


def helper(found: modules.Modules, folder: Path, after: str) -> Helper:
    folder.mkdir()
    script = COMPILING.replace("{after}", after)
    return Helper([sys.executable, "-c", script, str(folder)], found)


def placed(found: modules.Modules) -> dict[str, bytes]:
    paths = found.folder.rglob("*.ptx")
    return {str(path.relative_to(found.folder)): path.read_bytes() for path in paths}


WANTED = {"gather.ptx": b"gather", "deep/scatter.ptx": b"deep/scatter"}


@pytest.mark.parametrize("after", [END, "", "raise SystemExit(3)"], ids=["ends", "stops", "fails"])
def test_whole_modules_are_placed_and_kept(
    found: modules.Modules, tmp_path: Path, after: str
) -> None:
    helper(found, tmp_path / "other", after).finish(time.monotonic() + 60)
    assert placed(found) == WANTED
    assert (found.folder / "gather.txt").read_bytes() == b"a function of gather"
    assert not [*found.folder.rglob("*.new")]
    found.keep()
    later = make(tmp_path, Compiler())
    later.restore()
    assert placed(later) == WANTED


def test_a_module_of_this_process_stays(found: modules.Modules, tmp_path: Path) -> None:
    for end in ("ptx", "txt"):
        (found.folder / f"gather.{end}").write_bytes(b"own")
    helper(found, tmp_path / "other", END).finish(time.monotonic() + 60)
    assert placed(found) == WANTED | {"gather.ptx": b"own"}


def test_a_process_that_does_not_end_is_killed(found: modules.Modules, tmp_path: Path) -> None:
    one = helper(found, tmp_path / "other", "import time; time.sleep(600)")
    while placed(found) != WANTED:
        time.sleep(0.01)
    one.finish(time.monotonic())
    assert one._process.returncode == -9


def test_a_process_ends_with_the_worker(tmp_path: Path) -> None:
    """The input closes when the worker dies, here in the middle of an operation."""
    slow = f"""
import pathlib, time, types
from kvd.worker.artifacts import modules
from kvd.worker.serving import mlx_modules
modules.activate = lambda *_: None
modules.current = lambda: types.SimpleNamespace(folder=pathlib.Path({str(tmp_path)!r}))
mlx_modules.TASKS["slow"] = lambda _: iter([lambda: time.sleep(600)])
mlx_modules.main(["slow", "bfloat16"])
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", slow], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline().decode() == f"{tmp_path}\n"
        process.stdin.close()
        assert process.wait(60) == 0


def test_the_tasks_run_and_cover_what_a_load_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[Any]()
    monkeypatch.setattr(mlx_modules.sampler, "compile_modules", lambda: ran.append("sampling"))
    monkeypatch.setattr(mlx_modules.pool, "compile_modules", ran.extend)
    for task in mlx_modules.TASKS.values():
        for run in task(mx.float16):
            run()
    assert ran == [mx.uint32, mx.float16, "sampling"]


def test_without_cuda_a_process_only_says_that_it_fails() -> None:
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "-P", "-m", mlx_modules.__name__, "pages", "bfloat16"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait() == 1


def test_processes_start_on_a_large_device_and_before_any_modules_are_stored(
    found: modules.Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[list[str]]()
    ended = SimpleNamespace(finish=lambda _: None)
    monkeypatch.setattr(mlx_modules, "Helper", lambda command, _: started.append(command) or ended)
    monkeypatch.setattr(modules, "_current", None)
    large, small = {"total_memory": 24 << 30}, {"total_memory": 8 << 30}
    monkeypatch.setattr(mx, "device_info", lambda: large)
    mlx_modules.start({})
    monkeypatch.setattr(modules, "_current", found)
    monkeypatch.setattr(mx, "device_info", lambda: small)
    mlx_modules.start({})
    assert not started
    monkeypatch.setattr(mx, "device_info", lambda: large)
    mlx_modules.start({"torch_dtype": "float16"})
    assert [command[-2:] for command in started] == [["pages", "float16"], ["sampling", "float16"]]
    mlx_modules.finish()
    found._restored.add("gather")
    mlx_modules.start({})
    assert len(started) == 2
    assert not mlx_modules._running
