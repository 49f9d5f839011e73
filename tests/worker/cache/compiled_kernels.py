"""Kernels that copy and write pages, compiled as C++ for this processor."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.artifacts.cuda_text import KernelText
from kvd.worker.cache import device_pages, page_kernels
from tests.worker.kernels.build import compiler as find_gcc

needs_gcc = pytest.mark.skipif(find_gcc() is None, reason="the kernels are compiled with g++")

_PROGRAM = """
#include <cstddef>
#include <cstdint>
struct uint4 {{ uint32_t x, y, z, w; }};
struct Three {{ int x; }};
extern "C" void run({arguments}, int threads, int blocks) {{
  const Three blockDim = {{threads}}, gridDim = {{blocks}};
  {arrays}
  for (int block = 0; block < blocks; ++block)
    for (int thread = 0; thread < threads; ++thread) {{
      const Three blockIdx = {{block}}, threadIdx = {{thread}};
      {source}
    }}
}}
"""


def address(array: mx.array) -> int:
    """Return where an evaluated array is in the host's memory."""
    view: Any = array
    return int(np.frombuffer(memoryview(view).cast("B"), np.uint8).ctypes.data)


def compile_kernel(folder: Path, arguments: str, arrays: list[str], source: str) -> ctypes.CDLL:
    """Return a library whose ``run`` calls a kernel's body for each thread, in turn.

    ``arguments``: those of ``run`` before the numbers of threads and blocks. ``arrays``:
    declarations of the body's arrays. Compiled once for each body.
    """
    path = folder / f"{abs(hash((arguments, *arrays, source)))}.so"
    if not path.exists():
        text = _PROGRAM.format(arguments=arguments, arrays=" ".join(arrays), source=source)
        cpp = path.with_suffix(".cpp")
        cpp.write_text(text)
        command = [find_gcc() or "g++", "-shared", "-fPIC", "-O1", "-o", str(path), str(cpp)]
        subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(path))


class Compiled:
    """Compiles the kernels of `device_pages`, and counts their launches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launches = 0
        self.change: Callable[[str], str] = lambda source: source

    def __call__(self, text: KernelText) -> Any:
        names = [one.name for one in (*text.inputs, *text.outputs)]
        types = {"slots": "const int*", "sizes": "const int*", "done": "uint32_t*"}
        arrays = [
            f"{types.get(name, 'void*')} {name} = ({types.get(name, 'void*')})arrays[{at}];"
            for at, name in enumerate(names)
        ]
        arguments = "void* const* arrays, const int* slots_shape"
        library = compile_kernel(self._folder, arguments, arrays, self.change(text.source))

        def launch(
            *,
            inputs: Sequence[mx.array],
            grid: Any,
            threadgroup: Any,
            output_shapes: Any,
            output_dtypes: Any,
        ) -> list[mx.array]:
            self.launches += 1
            outputs = [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            mx.eval(inputs, outputs)
            pointers = (ctypes.c_void_p * (len(inputs) + len(outputs)))(
                *map(address, [*inputs, *outputs])
            )
            count = (ctypes.c_int * 1)(inputs[0].shape[0])
            library.run(pointers, count, threadgroup[0], grid[0] // threadgroup[0])
            return outputs

        return launch


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Body of a fixture: `device_pages` uses the compiled kernels until the test ends."""
    made = Compiled(folder)
    monkeypatch.setattr(page_kernels, "kernel_of", made)
    monkeypatch.setattr(device_pages, "_prepared", {})
    monkeypatch.setattr(device_pages, "on_cuda", lambda: True)
    cached = device_pages._put_kernel, device_pages._resize_kernel
    for one in cached:
        one.cache_clear()
    yield made
    for one in cached:
        one.cache_clear()
