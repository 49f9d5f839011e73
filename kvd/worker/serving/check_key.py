"""Everything that the checks of a load depend on, as one digest."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx_lm

import kvd
import protocol
from kvd.worker.artifacts import modules
from kvd.worker.artifacts.checks import MOST_BYTES, Checks
from kvd.worker.artifacts.entries import Entries, cache_folder, digest_of
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.native import build
from kvd.worker.native.activation import thread_count
from kvd.worker.serving.calibration import CalibrationResult
from kvd.worker.serving.fingerprint import fingerprint
from kvd.worker.serving.model_files import Headers
from protocol.weights import BrokenFileError
from protocol.worker import LoadModel

VARIABLE = "KVD_CHECKS"
PACKAGES = ("mlx-kvd", "mlx", "mlx-cuda-12", "mlx-cuda-13", "mlx-cpu", "mlx-metal", "mlx-lm")
_VARIABLES = ("MLX_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "NVIDIA_", "LD_PRELOAD", "KVD_NATIVE")
"""Prefixes of environment variables that can change results."""
_MORE_VARIABLES = ("KVD_ATTENTION",)
_IGNORED = ("MLX_PTX_CACHE_DIR",)
_DRIVER = Path("/proc/driver/nvidia/version")
_CPUINFO = Path("/proc/cpuinfo")
_MODEL_LINES = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
"""Lines of `_CPUINFO` by which BLAS chooses its kernels, besides the processor's features."""
BLAS_VARIABLE = "KVD_BLAS_PRELOADED"
"""The environment variable with the path of the BLAS library that is in use."""

_log = logging.getLogger("kvd.worker")


def open_checks(
    headers: Headers,
    command: LoadModel,
    settings: CacheSettings,
    verdict: CalibrationResult | None,
    library: ModuleType | None,
) -> Checks:
    """Return the checks of a load, with the results that are kept for it.

    ``verdict``: the model's calibration. With ``KVD_CHECKS=off`` in the environment, none are kept,
    so every load runs all checks.
    """
    if os.environ.get(VARIABLE) == "off":
        return Checks()
    try:
        model = fingerprint(headers).hex()
        stored = Entries(cache_folder("checks"), MOST_BYTES)
    except (OSError, BrokenFileError, RuntimeError) as error:  # RuntimeError: no home
        _log.info("the results of checks are not kept: %s", error)
        return Checks()
    kv = repr((command.kv, command.attention_scratch, settings.schemes, settings.mixes, verdict))
    return Checks(stored, digest_of(model, kv, *machine(), str(library and build.key())))


def machine() -> list[str]:
    """Return texts that identify the software and the device."""
    device = sorted(f"{key}={value}" for key, value in mx.device_info().items())
    stable = [text for text in device if not text.startswith("free_memory")]
    variables = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES + _MORE_VARIABLES) and name not in _IGNORED
    ]
    processor = [platform.machine(), build.processor(), *_processor_model(), str(thread_count())]
    kept = modules.current()  # some kernels run only if kvd compiles them
    processor.append("" if kept is None else kept.architecture)
    files = [*_sources(), *_libraries()]
    parts = (_versions(), files, [str(mx.default_device()), *stable], processor, variables)
    return ["\n".join(part) for part in parts]


def _versions() -> list[str]:
    found = [sys.version, platform.platform()]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    with contextlib.suppress(OSError):
        found.append(_DRIVER.read_text("utf-8", "replace"))
    return found


def _processor_model() -> list[str]:
    """Return what identifies the model of the first processor; empty without /proc."""
    try:
        text = _CPUINFO.read_text("utf-8", "replace")
    except OSError:
        return []
    lines = text.partition("\n\n")[0].splitlines()
    return [line for line in lines if line.partition(":")[0].strip() in _MODEL_LINES]


def _sources() -> list[str]:
    """Return name, size and time of the files of kvd and mlx-lm.

    These change between versions, and when a user edits a file.
    """
    found = []
    for package in (kvd, protocol, mlx_lm):
        for root in package.__path__:
            found += [
                _identity(path, str(path.relative_to(root)))
                for path in sorted(Path(root).rglob("*.py"))
            ]
    return found


def _libraries() -> list[str]:
    """Return path, size and time of the libraries that multiply.

    The path of BLAS is a link that stays the same when the system's package is updated, or when the
    user chooses another implementation.
    """
    own = Path(str(mx.__file__))
    files = [own, *sorted((own.parent / "lib").glob("libmlx*"))]
    if blas := os.environ.get(BLAS_VARIABLE):
        files.append(Path(blas).resolve())
    return [_identity(path, str(path)) for path in files]


def _identity(path: Path, name: str) -> str:
    try:
        about = path.stat()
    except OSError:
        return name
    return f"{name} {about.st_size} {about.st_mtime_ns}"
