"""CUDA kernels whose text MLX is told by the name of a file.

MLX 0.32.4 hashes a kernel's whole text at each of its launches, also in replays of compiled steps:
0.2 to 0.3 µs a KB, and the seven kernels of a layer have 47. So the text is in a file, whose name
is the hash of what is in it, and MLX gets a line that includes it. Metal's compiler reads no files
at run time, and has the text itself.

The folder is the user's and stays, for all processes: workers end without the interpreter's end, or
by a signal, and would leave a folder of their own behind. A file that is not as it was written is
written anew; where the folder cannot be written to, MLX gets the text itself.
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

_TOLD = ("shape", "strides", "ndim")
"""What MLX passes of an input if the text it got has ``{input}_{one of these}`` somewhere."""

_log = logging.getLogger(__name__)


def cuda_kernel(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
) -> Any:
    """Return `mx.fast.cuda_kernel` of the same arguments, whose text is in files where it can be.

    The files are read when MLX compiles, once for each template: ask anew for each.
    """
    try:
        source, header = _included(source) + _named(source, input_names), _included(header)
    except (OSError, RuntimeError) as error:  # the latter: nobody has a home here
        _tell(str(error))
    return mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
    )


def folder() -> Path:
    """Return where the files are."""
    return platformdirs.user_cache_path("kvd").absolute() / "kernels"


def _included(text: str) -> str:
    """Return the line that stands for a text; raises ``OSError`` where no file can."""
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.inc"
    if '"' in str(path) or not str(path).isprintable():
        raise OSError(f"{path} cannot be named in a kernel")
    if not _is_sound(path, text):
        _write(path, text)
    return f'#include "{path}"\n'


def _is_sound(path: Path, text: str) -> bool:
    try:
        for one in (path.parent.parent, path.parent, path):
            _check_ours(one)
        return path.read_bytes() == text.encode()
    except FileNotFoundError:
        return False


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all, also where two processes do."""
    for one in (path.parent.parent, path.parent):  # each of them by itself: a mode is the leaf's
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(one)
    handle, new = tempfile.mkstemp(dir=path.parent)  # for nobody else to read or write
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


def _check_ours(path: Path) -> None:
    """Raise ``PermissionError`` for code that others could have written."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to somebody else, or others can write to it")


def _named(source: str, input_names: Sequence[str]) -> str:
    """Return a comment with what the text has of its inputs' shapes: MLX looks for their names."""
    names = (f"{name}_{what}" for name in input_names for what in _TOLD)
    used = [name for name in names if name in source]
    return f"// {' '.join(used)}\n" if used else ""


@functools.cache
def _tell(why: str) -> None:
    _log.info("kernels are launched with their whole text, which takes longer: %s", why)
