"""CUDA kernels whose text MLX includes from a file.

MLX 0.32.4 hashes a kernel's whole text at each launch, also in replays of compiled steps: 0.2 to
0.3 µs per KB, and the seven kernels of a layer have 47 KB. So the text is in a file named after its
hash, and MLX gets one line that includes the file. Metal's compiler reads no files at run time and
gets the text itself.

All of the user's processes share one folder, which is never removed. A folder per process would be
left behind, because workers are ended by signals or skip the interpreter's shutdown. A file with
any other content than its text is written again. If the text cannot be stored, or if other users
could change the file, MLX gets the text itself.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs

_PROPERTIES = ("shape", "strides", "ndim")
"""MLX passes these properties of an input if the kernel's text contains ``{input}_{property}``."""

_log = logging.getLogger(__name__)


def cuda_kernel(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
) -> Any:
    """Return `mx.fast.cuda_kernel` of the same arguments, with the text in files if possible.

    MLX reads the files when it compiles the kernel, once per template. Call this for each template,
    so that the files are checked before.
    """
    try:
        source, header = _included(source) + _named(source, input_names), _included(header)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        _log_once(str(error))
    return mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
    )


def folder() -> Path:
    return platformdirs.user_cache_path("kvd").absolute() / "kernels"


def _included(text: str) -> str:
    """Return the line that includes a text; raises ``OSError`` if the text cannot be stored."""
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.inc"
    if '"' in str(path) or not str(path).isprintable():
        raise OSError(f"{path} contains characters that an #include line cannot contain")
    if not _is_sound(path, text):
        _write(path, text)
    return f'#include "{path}"\n'


def _is_sound(path: Path, text: str) -> bool:
    try:
        for checked_path in (path.parent.parent, path.parent, path):
            _check_owner(checked_path)
        return path.read_bytes() == text.encode()
    except FileNotFoundError:
        return False


def _write(path: Path, text: str) -> None:
    """Write a file atomically, also if two processes write it at once."""
    for checked_path in (path.parent.parent, path.parent):
        # One by one: `mkdir` applies the mode to the last folder only.
        checked_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(checked_path)
    handle, new = tempfile.mkstemp(dir=path.parent)  # readable and writable by this user only
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


def _check_owner(path: Path) -> None:
    """Raise ``PermissionError`` for code that other users could have written."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to another user, or others can write to it")


def _named(source: str, input_names: Sequence[str]) -> str:
    """Return a comment with the inputs' properties that the text uses.

    MLX looks for these names only in the text that it gets, not in the file.
    """
    names = (f"{name}_{what}" for name in input_names for what in _PROPERTIES)
    used = [name for name in names if name in source]
    return f"// {' '.join(used)}\n" if used else ""


@functools.cache
def _log_once(reason: str) -> None:
    _log.info("kernel files are not used, so launches take longer: %s", reason)
