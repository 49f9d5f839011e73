"""Runs a kernel without a GPU: `run(launch, language)` returns the outputs, or reports the fault.

Each launch runs twice: with threads in ascending order and buffers that end at an unmapped page,
then with threads in descending order and buffers that begin after one. Unwritten memory holds
different bytes in each run. Both runs must give the same bits. docs/kernels.md explains what this
proves.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.worker.kernels import build
from tests.worker.kernels.rules import check_rules
from tests.worker.kernels.wrap import Buffer, Language, Wrapped, wrap

__all__ = ["KernelFault", "check_rules", "run"]

_TIMEOUT = 120
"""Seconds for one run, so that an endless loop fails instead of hanging."""

_NUMPY: dict[mx.Dtype, Any] = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.bool_: np.bool_,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
}


class KernelFault(AssertionError):
    """An error in a kernel. The message describes it, with its place and thread if known."""


@dataclass(frozen=True)
class _Pass:
    """One way to run a launch."""

    descending: bool
    at_end: bool
    poison: int
    output_poison: int


# Bytes of 0xff are NaN in every floating type. Bytes of 0x7b are a large number: a maximum ignores
# NaN, but not that.
_ASCENDING = _Pass(descending=False, at_end=True, poison=0xFF, output_poison=0xA5)
_DESCENDING = _Pass(descending=True, at_end=False, poison=0x7B, output_poison=0x5A)
_DIRTY = replace(_ASCENDING, poison=0x7B)


def run(launch: Any, language: Language, *, races: bool = True) -> list[np.ndarray]:
    """Return the outputs of a launch: float32 for floating types, otherwise unchanged.

    Elements that the kernel has not written have bytes of 0xff: NaN, or -1. Without ``races``, only
    races that make the two runs differ are found, and compiling is faster. Raises `KernelFault`.
    """
    wrapped = wrap(launch, language)
    try:
        library = build.library(wrapped, language, races=races)
    except build.BuildFailed as error:
        raise KernelFault(f"{language}: {launch.name} does not compile:\n{error}") from None
    inputs = [_numpy(array) for array in launch.inputs]
    first = _run(launch, language, wrapped, library, inputs, _ASCENDING)
    second = _run(launch, language, wrapped, library, inputs, _DESCENDING)
    found = []
    for place, name in enumerate(launch.output_names):
        a, b = _bytes(first[place]), _bytes(second[place])
        unwritten = (a == _ASCENDING.output_poison).all(1) & (b == _DESCENDING.output_poison).all(1)
        differing = (a != b).any(1) & ~unwritten
        if differing.any():
            again = _run(launch, language, wrapped, library, inputs, _DIRTY)
            memory = bool((a != _bytes(again[place])).any())
            _fail_unequal(launch, language, name, differing, first[place], second[place], memory)
        a[unwritten] = 0xFF
        flat = _floating(first[place], launch.output_dtypes[place])
        found.append(flat.reshape(launch.output_shapes[place]))
    return found


def _numpy(array: mx.array) -> np.ndarray:
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(plain))


def _floating(flat: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    if dtype == mx.bfloat16:
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32) if dtype == mx.float16 else flat


def _bytes(flat: np.ndarray) -> np.ndarray:
    """View elements as rows of bytes."""
    return flat.view(np.uint8).reshape(flat.size, -1)


def _fail_unequal(
    launch: Any,
    language: Language,
    name: str,
    differing: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    memory: bool,
) -> None:
    place = int(differing.argmax())
    dtype = launch.output_dtypes[launch.output_names.index(name)]
    shape = launch.output_shapes[launch.output_names.index(name)]
    index = tuple(int(at) for at in np.unravel_index(place, shape))
    values = [_floating(each[place : place + 1], dtype)[0] for each in (first, second)]
    why = (
        "depends on memory that was not written (threadgroup memory, or behind a buffer's end)"
        if memory
        else "depends on the order in which threads run: a barrier is missing"
    )
    raise KernelFault(
        f"{language}: {launch.name}: output '{name}' {why}; {int(differing.sum())} of "
        f"{differing.size} elements differ, first {index}: {values[0]} and {values[1]}"
    )


def _run(
    launch: Any,
    language: Language,
    wrapped: Wrapped,
    library: Path,
    inputs: list[np.ndarray],
    how: _Pass,
) -> list[np.ndarray]:
    """Run once; return the outputs as flat arrays of numpy's types."""
    request = b"".join(_request(launch, language, wrapped, inputs, how))
    command = [str(build.runner()), str(library)]
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT,
            env=build.environment(),
        )
    except subprocess.TimeoutExpired:
        raise KernelFault(f"{language}: {launch.name} does not end") from None
    if done.returncode:
        report = done.stderr.decode(errors="replace").strip()
        raise KernelFault(
            f"{language}: {launch.name}: {_describe_fault(report, launch.source, library)}"
        )
    found, at = [], 0
    for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True):
        kind = np.dtype(_NUMPY[dtype])
        count = int(np.prod(shape, dtype=np.int64))
        found.append(np.frombuffer(done.stdout, kind, count, at).copy())
        at += count * kind.itemsize
    return found


def _describe_fault(report: str, source: str, library: Path) -> str:
    """Describe the runner's report of a fault, adding the text of its line."""
    if not report.startswith("FAULT "):
        return report or "the runner was killed"
    _, number, offset, text = report.split(" ", 3)
    line: int | None = int(number)
    if not line and offset != "ffffffffffffffff":
        line = build.line_of(library, int(offset, 16))
    lines = source.split("\n")
    if not line or line > len(lines):
        return text
    return f"{text}, line {line}: {lines[line - 1].strip()}"


def _request(
    launch: Any, language: Language, wrapped: Wrapped, inputs: list[np.ndarray], how: _Pass
) -> Sequence[bytes]:
    """Return the runner's input: `Request`, then `RequestBuffer` and content of each buffer."""
    metal = language == "metal"
    # MLX never requests a group larger than the grid from Metal.
    group = [
        min(of) if metal else of[0] for of in zip(launch.threadgroup, launch.grid, strict=True)
    ]
    head = struct.pack(
        "13I", *launch.grid, *group, metal, metal, how.descending, how.at_end, how.poison,
        how.output_poison, len(wrapped.buffers),
    )  # fmt: skip
    parts = [head]
    for buffer in wrapped.buffers:
        if buffer.role == "output":
            kind = np.dtype(_NUMPY[launch.output_dtypes[buffer.place]])
            size = int(np.prod(launch.output_shapes[buffer.place], dtype=np.int64)) * kind.itemsize
            parts.append(struct.pack("IIQ112s", 1, kind.itemsize, size, buffer.name.encode()))
            continue
        array = _input(buffer, inputs[buffer.place], language)
        name = buffer.name.encode()
        parts += [struct.pack("IIQ112s", 0, array.itemsize, array.nbytes, name), array.tobytes()]
    return parts


def _input(buffer: Buffer, array: np.ndarray, language: Language) -> np.ndarray:
    if buffer.role == "input":
        return array
    if buffer.role == "ndim":
        return np.array([array.ndim], np.int32)
    found = (
        np.array(array.shape, np.int32)
        if buffer.role == "shape"
        else np.array([stride // array.itemsize for stride in array.strides], np.int64)
    )
    # CUDA kernels get shape and strides by value, with room for eight axes.
    return np.pad(found, (0, 8 - array.ndim)) if language == "cuda" else found
