"""Modules of MLX's own operations that other processes compile during a load."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.artifacts import modules
from kvd.worker.cache import pool
from kvd.worker.sampling import sampler
from kvd.worker.serving import compile_mlx, mlx_modules
from kvd.worker.serving.mlx_modules import Helper
from tests.worker.kernels.test_modules import Compiler, make

pytestmark = pytest.mark.mlx

COMPILING = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
say = lambda line: os.write(1, line + b"\\n")
say(b"a library prints")
say(b"folder " + bytes(folder))
(folder / "half.ptx").write_bytes(b"not reported: it is being written")
(folder / "half.txt").write_bytes(b"")
names = []
for name in ("gather", "deep/scatter"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / f"{name}.ptx").write_bytes(name.encode())
    (folder / f"{name}.txt").write_bytes(b"a function of " + name.encode())
    names.append(name)
    say(b"done " + "\\t".join(names).encode())
{after}
"""
END = 'say(b"end"); sys.stdin.read()'


@pytest.fixture
def found(tmp_path: Path) -> modules.Modules:
    return make(tmp_path, Compiler())


def helper(found: modules.Modules, after: str, folder: Path | None = None) -> Helper:
    folder = folder or found.folder.parent / "other"
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
    helper(found, after).finish(time.monotonic() + 60)
    assert placed(found) == WANTED
    assert (found.folder / "gather.txt").read_bytes() == b"a function of gather"
    assert {path.suffix for path in found.folder.rglob("*.*")} == {".ptx", ".txt"}
    found.keep()
    later = make(tmp_path, Compiler())
    later.restore()
    assert placed(later) == WANTED


def test_a_module_of_this_process_stays(found: modules.Modules) -> None:
    for end in ("ptx", "txt"):
        (found.folder / f"gather.{end}").write_bytes(b"own")
    helper(found, END).finish(time.monotonic() + 60)
    assert placed(found) == WANTED | {"gather.ptx": b"own"}


def test_another_folder_is_not_trusted(found: modules.Modules, tmp_path: Path) -> None:
    helper(found, END, tmp_path / "elsewhere").finish(time.monotonic() + 60)
    assert not placed(found)


def test_threads_that_place_the_same_modules_see_them_whole(found: modules.Modules) -> None:
    names, size = [f"m{number}" for number in range(40)], 1 << 16
    folders = [found.folder.parent / f"other{number}" for number in range(4)]
    for folder in folders:
        folder.mkdir()
        for name in names:
            (folder / f"{name}.ptx").write_bytes(bytes(size))
            (folder / f"{name}.txt").write_bytes(b"functions")
    threads = [Thread(target=found.adopt, args=(folder, names)) for folder in folders]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert all(len(content) == size for content in placed(found).values())
    assert len(placed(found)) == len(names)
    assert not found._failed


def test_a_process_that_does_not_end_is_killed(found: modules.Modules) -> None:
    one = helper(found, "import time; time.sleep(600)")
    while placed(found) != WANTED:
        time.sleep(0.01)
    one.finish(time.monotonic())
    assert one._process.returncode == -9


def test_a_process_ends_with_the_worker(tmp_path: Path) -> None:
    """The input closes when the worker dies, here in the middle of an operation."""
    slow = f"""
import pathlib, time, types
from kvd.worker.artifacts import modules
from kvd.worker.serving import compile_mlx
modules.activate = lambda *_: None
modules.current = lambda: types.SimpleNamespace(folder=pathlib.Path({str(tmp_path)!r}))
compile_mlx.TASKS["slow"] = lambda _: iter([lambda: time.sleep(600)])
compile_mlx.main(["slow", "bfloat16"])
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", slow], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline().decode() == f"folder {tmp_path}\n"
        process.stdin.close()
        assert process.wait(60) == 0


def test_the_tasks_run_and_cover_what_a_load_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[Any]()
    monkeypatch.setattr(sampler, "compile_modules", lambda: ran.append("sampling"))
    monkeypatch.setattr(pool, "compile_modules", ran.extend)
    for task in compile_mlx.TASKS.values():
        for run in task(mx.float16):
            run()
    assert ran == [mx.uint32, mx.float16, "sampling"]


def test_without_cuda_a_process_only_says_that_it_fails() -> None:
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "-P", "-m", compile_mlx.__name__, "pages", "bfloat16"]
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
    monkeypatch.setattr(mx, "device_info", lambda: large)
    mlx_modules.start({}, alone=False)
    found._restored.add("gather")
    mlx_modules.start({})
    assert not started
    found._restored.clear()
    mlx_modules.start({"torch_dtype": "float16"})
    assert [command[-2:] for command in started] == [["pages", "float16"], ["sampling", "float16"]]
    mlx_modules.start({})  # another load has started them
    assert len(started) == 2
    mlx_modules.finish()
    assert not mlx_modules._running


def test_a_strange_dtype_in_the_configuration_does_not_matter(
    found: modules.Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[list[str]]()
    ended = SimpleNamespace(finish=lambda _: None)
    monkeypatch.setattr(mlx_modules, "Helper", lambda command, _: started.append(command) or ended)
    monkeypatch.setattr(modules, "_current", found)
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 24 << 30})
    mlx_modules.start({"torch_dtype": "bf\0"})
    assert [command[-1] for command in started] == ["bfloat16"] * 2
    mlx_modules.finish()


def test_a_process_that_cannot_start_costs_only_time(
    found: modules.Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("too many processes")

    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(modules, "_current", found)
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 24 << 30})
    mlx_modules.start({})
    assert not mlx_modules._running
