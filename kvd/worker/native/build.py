"""Builds the native library once per machine, in seconds, with the compiler that MLX's JIT uses.

kvd ships no binary: MLX's binary interface changes with its version, and the code runs fastest if
compiled for the exact processor. MLX's distributions include the headers that the build needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import platformdirs

_log = logging.getLogger("kvd.worker")

NAME = "kvd_native"
SOURCES = Path(__file__).parent / "src"
_PREFIX = ".building-"
_TIMEOUT_S = 300
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    # A row's numbers must not depend on which products and sums a compiler fuses.
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # nanobind requires it
    "-fPIC",
    "-fvisibility=hidden",
    "-DNDEBUG",
    "-DNB_COMPACT_ASSERTIONS",
    "-DNB_DOMAIN=mlx",  # shares types with MLX's Python module
)


class NotBuiltError(Exception):
    """The library is not available here; the text says why and what to do."""


@cache
def load() -> ModuleType:
    """Return the library, built first if needed; raises `NotBuiltError`."""
    try:
        return _loaded(library())
    except OSError as error:
        raise NotBuiltError(
            f"the native library cannot be stored ({error}); set XDG_CACHE_HOME to a folder"
            " that this user can write to"
        ) from error
    except (ImportError, PackageNotFoundError, TypeError, RuntimeError) as error:
        raise NotBuiltError(f"the native library does not work with this MLX: {error}") from error


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise NotBuiltError(f"{path} is no Python extension")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Fail now if arrays do not pass from MLX to the library and back.
    found = module.rms_norm(mx.ones((2, 8)), None, 0.0)
    if not bool(mx.array_equal(found, mx.ones((2, 8))).item()):
        raise RuntimeError("a test call of rms_norm returned wrong values")
    return module


def is_built() -> bool:
    try:
        return _is_sound(_path())
    except (OSError, PackageNotFoundError):
        return False


def library() -> Path:
    """Return the library's path, built first if needed; raises `NotBuiltError` and ``OSError``.

    A damaged file (a full disk, a lost rename) is built again, because loading it could end the
    process.
    """
    path = _path()
    if not _is_sound(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        with _locked(path.parent):
            if not _is_sound(path):  # another process may have built it meanwhile
                _build(path)
    _check_owner(path)
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process ends.

    A build takes 22 s of CPU time. Workers that start together wait for one build.
    """
    with (folder / ".lock").open("w") as lock:
        with suppress(OSError):  # a file system without locks: each worker builds
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(f"{_PREFIX}*"):  # of a build that was killed
                shutil.rmtree(left, ignore_errors=True)
        yield


def _build(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path.parent) as folder:
        built = _compiled(Path(folder))
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.chmod(0o700)  # whatever the umask
        digest = built.with_suffix(".sha256")
        digest.write_text(_digest(built))
        # Each rename is atomic, so nothing loads half a library. After a crash between the two,
        # the digest does not match, and the next process builds again.
        digest.replace(path.with_suffix(".sha256"))
        built.replace(path)


def _is_sound(path: Path) -> bool:
    try:
        return path.with_suffix(".sha256").read_text() == _digest(path)
    except FileNotFoundError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_owner(path: Path) -> None:
    """Raise `NotBuiltError` for code that other users could have written."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NotBuiltError(f"{path} belongs to another user, or others can write to it")


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def _path() -> Path:
    return platformdirs.user_cache_path("kvd") / "native" / f"{NAME}-{key()}.so"


def key() -> str:
    """Return a digest of the sources, and of everything that the compiled code depends on."""
    parts = [sys.version, version("mlx"), version("nanobind"), " ".join(_FLAGS), processor()]
    parts += [file.read_text("utf-8") for file in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """Return the processor's features.

    They are part of the file's name, because different machines may share a home folder.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compiled(folder: Path) -> Path:
    import nanobind  # type: ignore[import-untyped]  # noqa: PLC0415 - only to compile

    if (command := compiler()) is None:
        raise NotBuiltError("no C++ compiler is installed (Debian: g++)")
    binding = Path(nanobind.include_dir()).parent
    mlx = Path(str(mx.__file__)).parent  # `mlx` is a namespace package, which has no file
    includes = [binding / "include", binding / "ext" / "robin_map" / "include", mlx / "include"]
    includes.append(Path(sysconfig.get_path("include")))
    target = folder / f"{NAME}.so"
    _log.info("building kvd's operations for this processor, once, with %s", command)
    arguments = [*_FLAGS, *(f"-I{path}" for path in includes)]
    arguments += [str(SOURCES / "module.cpp"), str(binding / "src" / "nb_combined.cpp")]
    arguments += ["-shared", "-o", str(target), f"-L{mlx / 'lib'}", "-lmlx"]
    try:
        done = subprocess.run(  # noqa: S603 - the compiler, over our own sources
            [command, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuiltError(f"{command} failed: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise NotBuiltError(f"{command} failed: {lines[0][:300]}")
    return target
