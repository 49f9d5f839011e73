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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.artifacts.cuda_text import Argument, KernelText
from kvd.worker.artifacts.entries import cache_folder, check_owner, write_private

_PROPERTIES = ("shape", "strides", "ndim")
"""MLX passes these properties of an input if the kernel's text contains ``{input}_{property}``."""

_log = logging.getLogger(__name__)


class CudaKernel:
    """A custom kernel for one template. Its first call provides its compiled module, if possible.

    MLX reads the files when it compiles the kernel. Create one for each template, so that the files
    are checked before.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
    ) -> None:
        self._name, self._names = name, (tuple(input_names), tuple(output_names))
        self._source, self._header = source, header
        self._provided = False
        try:
            source, header = _included(source) + _named(source, input_names), _included(header)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            _log_once(str(error))
        self._mlx_source, self._mlx_header = source, header
        self._launch: Any = mx.fast.cuda_kernel(
            name=name,
            input_names=list(input_names),
            output_names=list(output_names),
            source=source,
            header=header,
        )

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        template: list[tuple[str, Any]],
        output_dtypes: list[mx.Dtype],
        **launch: Any,
    ) -> Any:
        """Add the kernel to the graph, as the object that `mx.fast.cuda_kernel` returns does."""
        if not self._provided:
            self._provided = True
            self.provide(inputs, template, output_dtypes)
        return self._launch(inputs=inputs, template=template, output_dtypes=output_dtypes, **launch)

    def provide(
        self, inputs: list[mx.array], template: list[tuple[str, Any]], output_dtypes: list[mx.Dtype]
    ) -> bool:
        """Return whether MLX finds a module that kvd has compiled (`Modules.provide`)."""
        found = modules.current()
        return found is not None and found.provide(self.text(inputs, template, output_dtypes))

    def text(
        self, inputs: list[mx.array], template: list[tuple[str, Any]], output_dtypes: list[mx.Dtype]
    ) -> KernelText:
        """Return the kernel's texts for a launch."""
        names_in, names_out = self._names
        given = zip(names_in, inputs, strict=True)
        return KernelText(
            name=self._name,
            inputs=tuple(Argument(name, array.dtype, array.ndim == 0) for name, array in given),
            outputs=tuple(map(Argument, names_out, output_dtypes)),
            template=tuple(template),
            source=self._source,
            header=self._header,
            mlx_source=self._mlx_source,
            mlx_header=self._mlx_header,
        )


def folder() -> Path:
    return cache_folder("kernels")


def _included(text: str) -> str:
    """Return the line that includes a text; raises ``OSError`` if the text cannot be stored."""
    path = folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.inc"
    if '"' in str(path) or not str(path).isprintable():
        raise OSError(f"{path} contains characters that an #include line cannot contain")
    if not _is_sound(path, text):
        write_private(path, text.encode())
    return f'#include "{path}"\n'


def _is_sound(path: Path, text: str) -> bool:
    try:
        for checked_path in (path.parent.parent, path.parent, path):
            check_owner(checked_path)
        return path.read_bytes() == text.encode()
    except FileNotFoundError:
        return False


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
