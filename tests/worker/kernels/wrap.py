"""The text that MLX compiles for a custom kernel: the signature it writes around a body.

Follows MLX 0.32.4 (mlx/backend/common/metal_kernel.cpp, mlx/backend/cuda/custom_kernel.cpp).
`test_shim.py` compares the Metal text with MLX's own. Does not cover `atomic_outputs`, nor MLX's
own headers before the text, which `shim/` replaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

Language = Literal["metal", "cuda"]

_CONSTANT_BELOW = 8
"""Metal inputs with fewer elements are in the constant address space."""

_METAL_TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
}
_CUDA_TYPES = _METAL_TYPES | {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}

ATTRIBUTES = (
    ("dispatch_quadgroups_per_threadgroup", "uint"),
    ("dispatch_simdgroups_per_threadgroup", "uint"),
    ("dispatch_threads_per_threadgroup", "uint3"),
    ("grid_origin", "uint3"),
    ("grid_size", "uint3"),
    ("quadgroup_index_in_threadgroup", "uint"),
    ("quadgroups_per_threadgroup", "uint"),
    ("simdgroup_index_in_threadgroup", "uint"),
    ("simdgroups_per_threadgroup", "uint"),
    ("thread_execution_width", "uint"),
    ("thread_index_in_quadgroup", "uint"),
    ("thread_index_in_simdgroup", "uint"),
    ("thread_index_in_threadgroup", "uint"),
    ("thread_position_in_grid", "uint3"),
    ("thread_position_in_threadgroup", "uint3"),
    ("threadgroup_position_in_grid", "uint3"),
    ("threadgroups_per_grid", "uint3"),
    ("threads_per_grid", "uint3"),
    ("threads_per_simdgroup", "uint"),
    ("threads_per_threadgroup", "uint3"),
)
"""Names and types of the Metal thread attributes that a kernel may use, in MLX's order."""

_CUDA_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define inf cuda::std::numeric_limits<float>::infinity()

"""


@dataclass(frozen=True)
class Buffer:
    """One pointer argument of the kernel."""

    name: str
    type: str
    """C++ type of an element."""
    role: Literal["input", "output", "shape", "strides", "ndim"]
    place: int
    """Index of the launch's input or output."""
    constant: bool = False
    by_reference: bool = False


@dataclass(frozen=True)
class Wrapped:
    """A kernel as MLX compiles it."""

    text: str
    body_line: int
    """The line of `text` on which the body begins, from 1."""
    call: str
    """The kernel's qualified name with its template arguments."""
    buffers: tuple[Buffer, ...]
    attributes: tuple[str, ...]


def wrap(launch: Any, language: Language) -> Wrapped:
    """Return the text that MLX compiles for a launch."""
    return _metal(launch) if language == "metal" else _cuda(launch)


def _buffers(launch: Any, types: dict[mx.Dtype, str]) -> tuple[Buffer, ...]:
    found = []
    for place, (name, array) in enumerate(zip(launch.input_names, launch.inputs, strict=True)):
        small = array.size < _CONSTANT_BELOW
        found.append(Buffer(name, types[array.dtype], "input", place, small, array.ndim == 0))
        if array.ndim == 0:
            continue
        if f"{name}_shape" in launch.source:
            found.append(Buffer(f"{name}_shape", "int", "shape", place, constant=True))
        if f"{name}_strides" in launch.source:
            found.append(Buffer(f"{name}_strides", "int64_t", "strides", place, constant=True))
        if f"{name}_ndim" in launch.source:
            found.append(Buffer(f"{name}_ndim", "int", "ndim", place, True, True))
    for place, name in enumerate(launch.output_names):
        found.append(Buffer(name, types[launch.output_dtypes[place]], "output", place))
    return tuple(found)


def _metal(launch: Any) -> Wrapped:
    buffers = _buffers(launch, _METAL_TYPES)
    name = _metal_name(launch)
    attributes = tuple(about for about, _ in ATTRIBUTES if about in launch.source)
    head = launch.header + _metal_template(launch) + f"[[kernel]] void {name}(\n"
    lines = []
    for index, buffer in enumerate(buffers):
        sign = "&" if buffer.by_reference else "*"
        space = "constant" if buffer.constant else "device"
        front = "device" if buffer.role == "output" else f"const {space}"
        lines.append(f"  {front} {buffer.type}{sign} {buffer.name} [[buffer({index})]]")
    lines += [f"  {kind} {about} [[{about}]]" for about, kind in ATTRIBUTES if about in attributes]
    head += ",\n".join(lines) + ") {\n"
    text = head + launch.source + "\n}\n"
    call = name
    if launch.template:
        call += "<" + ", ".join(_metal_argument(value) for _, value in launch.template) + ">"
        text += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({call}) {call};\n'
    return Wrapped(text, head.count("\n") + 1, call, buffers, attributes)


def _metal_name(launch: Any) -> str:
    """Return the name under which MLX caches a pipeline. Each name has one source."""
    name = f"custom_kernel_{launch.name}"
    if launch.template:
        name += "__" + "_".join(_metal_argument(value) for _, value in launch.template)
        name = name.replace("-", "_")
    for array in launch.inputs:
        name += f"_{_METAL_TYPES[array.dtype]}"
        name += "s" if array.ndim == 0 else "c" if array.size < _CONSTANT_BELOW else ""
    for dtype in launch.output_dtypes:
        name += f"_{_METAL_TYPES[dtype]}"
    return name


def _metal_template(launch: Any) -> str:
    if not launch.template:
        return ""
    kinds = [f"{_kind(value)} {name}" for name, value in launch.template]
    return f"template <{', '.join(kinds)}>\n"


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _metal_argument(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) else _METAL_TYPES[value]


def _cuda(launch: Any) -> Wrapped:
    buffers = _buffers(launch, _CUDA_TYPES)
    name = f"custom_kernel_{launch.name}"
    for _, value in launch.template:
        name += f"_{_cuda_hashed(value)}"
    head = _CUDA_HEADER + launch.header
    head += "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
    head += f"__global__ void {name}(\n"
    lines = []
    for buffer in buffers:
        if buffer.role in ("shape", "strides", "ndim"):
            kind = {"shape": "Shape", "strides": "Strides", "ndim": "int"}[buffer.role]
            lines.append(f"    const __grid_constant__ {kind} {buffer.name}")
        else:
            front = "" if buffer.role == "output" else "const "
            lines.append(f"    {front}{buffer.type}* {buffer.name}")
    head += ",\n".join(lines) + ") {\n"
    for known, value in launch.template:
        if isinstance(value, bool):
            head += f"  constexpr bool {known} = {str(value).lower()};\n"
        elif isinstance(value, int):
            head += f"  constexpr int {known} = {value};\n"
        else:
            head += f"  using {known} = {_CUDA_TYPES[value]};\n"
    head += "\n" if launch.template else ""
    text = head + launch.source + "\n}\n\n} // namespace mlx::core::cu\n"
    return Wrapped(text, head.count("\n") + 1, f"mlx::core::cu::{name}", buffers, ())


def _cuda_hashed(value: Any) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value) if isinstance(value, int) else _METAL_TYPES[value]
