"""Compiled CUDA kernels: made in threads, kept on disk, and placed where MLX looks for them.

MLX compiles custom kernels one after another and keeps none of them. So kvd compiles its own, with
a much shorter text (`kvd.worker.artifacts.cuda_text`), and stores the modules. The modules of MLX's
own operations, which MLX does keep, are stored with them once the model is loaded.

MLX trusts every file in its folder. So each process has a folder of its own, which it fills with
verified entries, and other processes' half-written files are never read. A process holds a lock in
its folder; folders without a holder are deleted by the next process. Modules that a child process
has compiled for this one are copied (`Modules.adopt`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from threading import Lock, get_ident

import mlx.core as mx

from kvd.worker.artifacts.cuda_text import KernelText
from kvd.worker.artifacts.entries import Entries, cache_folder, digest_of, make_private
from kvd.worker.artifacts.nvrtc import CompileError, Nvrtc
from kvd.worker.device import on_cuda
from kvd.worker.engine import ReportProgress

FOLDER_VARIABLE = "MLX_PTX_CACHE_DIR"
"""The environment variable in which MLX finds its folder. A user's own value turns this off."""
MOST_BYTES = 256 * 1024 * 1024
"""Limit of the stored modules; those of a model take about 5 MB."""
MOST_THREADS = 16
FIRST_CAPABILITY = 80
"""Older devices cannot convert floats to bfloat16 in one instruction, as kvd's text does."""
HOPPER = 90
"""Compute capability of Hopper. From it on, kvd compiles for the exact device (``sm_90a``)."""
PROGRESS_S = 0.5
"""Seconds between two reports of how many kernels are compiled."""
_UNLOCKED_S = 3600.0
"""Age in seconds after which a folder that is still being created counts as left behind."""

_log = logging.getLogger("kvd.worker")

Compile = Callable[[str], bytes]
"""Returns the module of a text; raises `CompileError`."""


class Modules:
    """The modules of one process, for one device and one compiler."""

    def __init__(
        self,
        compile_text: Compile,
        key: str,
        stored: Entries,
        folder: Path,
        progress: ReportProgress = lambda _stage, _fraction: None,
        architecture: str = "",
    ) -> None:
        """``key``: what modules depend on besides their text. ``folder``: MLX's.

        ``architecture``: what `Compile` compiles for, such as ``sm_90a``.
        """
        self.architecture = architecture
        self._compile = compile_text
        self._key = key
        self.progress = progress
        self._stored = stored
        self.folder = folder
        self._known: set[str] = set()
        """Modules that were requested, by MLX's names."""
        self._restored: set[str] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        self.compiled = 0
        """Modules that were compiled because the store did not have them."""
        self._failed: set[str] = set()
        """Modules that could not be compiled or placed."""
        self._adopting = Lock()

    def provide(self, text: KernelText) -> bool:
        """Place a kernel's module where MLX looks for it; return whether it is there.

        If it is not, MLX compiles the kernel. MLX must not run the kernel before. Within `ahead`,
        the module is placed when that ends, and the answer may be True although that fails.
        """
        name = text.module
        if name not in self._known:
            self._known.add(name)
            if self._threads is None:
                self._place(text, name)
            else:
                self._waiting.append(self._threads.submit(self._place, text, name))
        return name not in self._failed

    @contextmanager
    def ahead(self, fraction: float) -> Iterator[None]:
        """Compile in threads what is requested in this context; wait for all of it at the end.

        Nothing that is built in it may be evaluated before. ``fraction``: of the load, for
        progress.
        """
        count = max(1, min(MOST_THREADS, os.cpu_count() or 1))
        with ThreadPoolExecutor(count, thread_name_prefix="kvd-compile") as threads:
            self._threads = threads
            try:
                yield
            finally:
                self._threads = None
                started, self._waiting = self._waiting, []
                _, left = wait(started, timeout=0)
                while left:
                    stage = f"compiling {len(started) - len(left)} of {len(started)}"
                    self.progress(stage, fraction)
                    _, left = wait(left, timeout=PROGRESS_S)
        for one in started:
            one.result()

    def _place(self, text: KernelText, module_name: str) -> None:
        name = digest_of(self._key, text.own_text)
        module = self._stored.get(name)
        if module is None:
            try:
                module = self._compile(text.own_text)
            except CompileError as error:
                self._failed.add(module_name)
                _log.warning("MLX compiles the kernel %s itself: %s", text.name, error)
                return
            self.compiled += 1
            self._stored.put(name, module)
        self._put(module_name, f"{text.kernel}\t{text.symbol}\n".encode(), module)

    def _put(self, name: str, functions: bytes, module: bytes) -> None:
        path = self.folder / f"{name}.ptx"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(path.with_suffix(".txt"), functions)
            _write(path, module)
        except OSError as error:
            self._failed.add(name)
            _log.warning("MLX compiles %s again: %s", name, error)

    def restore(self) -> None:
        """Place the modules of MLX's own operations that earlier processes stored."""
        for entry in self._stored.names():
            if entry.startswith(self._prefix) and (content := self._stored.get(entry)):
                name, functions, module = content.split(b"\0", 2)
                self._restored.add(name.decode())
                self._put(name.decode(), functions, module)

    @property
    def has_restored(self) -> bool:
        """Whether there were modules of MLX's own operations."""
        return bool(self._restored)

    def adopt(self, folder: Path, names: Iterable[str]) -> None:
        """Place modules of MLX's own operations that a child process has compiled in ``folder``.

        The child must have run them, so that their files are complete.
        """
        for name in names:
            with self._adopting, suppress(OSError):
                if not (self.folder / f"{name}.ptx").exists():
                    self._put(name, *_read(folder / f"{name}.ptx"))

    def keep(self) -> None:
        """Store the modules of MLX's own operations that this process has compiled.

        MLX must have run them, so that their files are complete.
        """
        for name in names_in(self.folder):
            if name in self._known or name in self._restored:
                continue
            with suppress(OSError):
                content = b"\0".join([name.encode(), *_read(self.folder / f"{name}.ptx")])
                self._restored.add(name)
                self._stored.put(self._prefix + digest_of(name), content)

    @property
    def _prefix(self) -> str:
        return f"mlx-{digest_of(self._key)}-"


_current: Modules | None = None


def current() -> Modules | None:
    """Return this process's modules; None if MLX compiles all kernels itself."""
    return _current


def ahead(fraction: float) -> AbstractContextManager[None]:
    """Return `Modules.ahead` of this process's modules; a context without effect if it has none."""
    return nullcontext() if _current is None else _current.ahead(fraction)


def activate(progress: ReportProgress) -> None:
    """Let this process keep modules, if its device runs CUDA. Call it before MLX compiles any."""
    global _current  # noqa: PLW0603 - MLX's folder belongs to the process as well
    if _current is not None or FOLDER_VARIABLE in os.environ or not on_cuda():
        return
    info, compiler = mx.device_info(), Nvrtc.loaded()
    capability = [info.get(f"compute_capability_{part}") for part in ("major", "minor")]
    if compiler is None or None in capability:
        return
    number = int("".join(map(str, capability)))
    if number < FIRST_CAPABILITY:
        return
    try:
        root = cache_folder("modules")
        folder = process_folder(root)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        _log.info("compiled kernels are not kept: %s", error)
        return
    # The letter allows instructions that only this architecture has.
    architecture = f"sm_{number}a" if number >= HOPPER else f"sm_{number}"
    key = digest_of(architecture, compiler.version, version("mlx"))
    stored = Entries(root / "kernels", MOST_BYTES)
    found = Modules(
        lambda text: compiler.compile(text, architecture),
        key,
        stored,
        folder,
        progress,
        architecture,
    )
    found.restore()
    os.environ[FOLDER_VARIABLE] = str(folder)
    _current = found


def names_in(folder: Path) -> set[str]:
    """Return the names of the modules in a folder."""
    return {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.ptx")}


def _read(path: Path) -> tuple[bytes, bytes]:
    """Return the names of a module's functions, and its code."""
    return path.with_suffix(".txt").read_bytes(), path.read_bytes()


def _write(path: Path, content: bytes) -> None:
    """Write a file that other threads see whole."""
    whole = path.with_suffix(f"{path.suffix}.{get_ident()}")
    try:
        whole.write_bytes(content)
        whole.replace(path)
    except OSError:
        whole.unlink(missing_ok=True)
        raise


def process_folder(root: Path) -> Path:
    """Create a folder of this process, and delete those whose processes have ended.

    Raises ``OSError``.
    """
    make_private(root)
    running = root / "running"
    running.mkdir(mode=0o700, exist_ok=True)
    _delete_left_behind(running)
    new = Path(tempfile.mkdtemp(prefix=".", dir=running))
    lock(new)  # held until the process ends
    return new.replace(running / f"{os.getpid()}-{new.name[1:]}")


def lock(folder: Path) -> int:
    """Return a descriptor that holds a folder's lock. Raises ``OSError`` if another has it."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _delete_left_behind(running: Path) -> None:
    for folder in running.iterdir():
        with contextlib.suppress(OSError):
            age = time.time() - folder.stat().st_mtime
            if folder.name.startswith(".") and age < _UNLOCKED_S:
                continue  # another process creates it
            handle = lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)
