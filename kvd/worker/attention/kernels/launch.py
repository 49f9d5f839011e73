"""Turns a decode step's arrays into kernel launches, and passes launches to MLX."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from kvd.worker.attention.kernels import append, decode, matrix, rotate
from kvd.worker.attention.kernels.arguments import Append, Attention, Rotate
from kvd.worker.attention.kernels.kernel_files import CudaKernel
from kvd.worker.attention.kernels.language import CUDA, METAL, Language
from kvd.worker.attention.kernels.shape import LANES, Shape, Side
from kvd.worker.cache.backend import LevelPackings
from kvd.worker.device import on_cpu


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments. Creating one compiles and runs nothing."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    inputs: list[mx.array]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]
    grid: tuple[int, int, int]
    """Threads."""
    threadgroup: tuple[int, int, int]
    template: tuple[tuple[str, mx.Dtype], ...]


def sides_of(packings: LevelPackings) -> tuple[Side, ...]:
    return tuple(Side(*packing) for packing in packings)


def split_launch(shape: Shape, language: Language, given: Attention) -> Launch:
    """Return the launch that processes each split independently.

    Its output, ``[splits, kv_heads, vectors, v_dim + 2]`` float32, holds sums of values, the
    maximum (of base-2 logits) and the sum of weights; undefined for padding.
    """
    text, tiles, warps = _split_plan(shape, language)
    count = given.splits.shape[0]
    arrays = {
        "queries": given.queries,
        "pages": given.pages,
        "tail_keys": given.tail_keys,
        "tail_values": given.tail_values,
        "rows": given.rows,
        "splits": given.splits,
        **dict(zip(_pool_names(shape), given.pools, strict=True)),
    }
    return Launch(
        name=kernel_name("split", text),
        input_names=tuple(arrays),
        output_names=("parts",),
        source=text,
        header=_header(shape, language, warps * LANES),
        inputs=list(arrays.values()),
        output_shapes=[(count, shape.kv_heads, shape.vectors, decode.entry(shape))],
        output_dtypes=[mx.float32],
        grid=(count * warps * LANES, shape.kv_heads, -(-shape.tiles // tiles)),
        threadgroup=(warps * LANES, 1, 1),
        template=(("T", shape.dtype),),
    )


def combine_launch(
    shape: Shape,
    language: Language,
    parts: mx.array,
    rows: mx.array,
    batch: int,
    sinks: mx.array | None = None,
) -> Launch:
    """Return the launch that combines each row's splits, ``[batch, q_heads, L, v_dim]``.

    ``parts``: the output of `split_launch`. ``rows`` and ``sinks`` are as in `Attention`.
    """
    text, threads = _combine_text(shape, language), decode.combine_threads(shape)
    q_heads = shape.kv_heads * shape.repeats
    extra = [] if sinks is None else [sinks]
    return Launch(
        name=kernel_name("combine", text),
        input_names=("parts", "rows", *(["sinks"] if extra else [])),
        output_names=("out",),
        source=text,
        header=_header(shape, language),
        inputs=[parts, rows, *extra],
        output_shapes=[(batch, q_heads, shape.queries, shape.v_dim)],
        output_dtypes=[shape.dtype],
        grid=(batch * q_heads * shape.queries * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=(("T", shape.dtype),),
    )


def append_launch(language: Language, given: Append) -> Launch:
    _, heads, _, k_dim = given.tail_keys.shape
    dtype, v_dim = given.tail_keys.dtype, given.tail_values.shape[-1]
    text = _append_text(
        language, heads, k_dim, v_dim, dtype.size, token_rows=given.token_rows is not None
    )
    pieces = (given.tail_keys.nbytes + given.tail_values.nbytes) // append.PIECE
    arrays = {
        "tail_keys": given.tail_keys,
        "tail_values": given.tail_values,
        "keys": given.keys,
        "values": given.values,
        "places": given.token_places,
        **({} if given.token_rows is None else {"givers": given.token_rows}),
    }
    return Launch(
        name=kernel_name("append", text),
        input_names=tuple(arrays),
        output_names=("new_keys", "new_values"),
        source=text,
        header=language.header,
        inputs=list(arrays.values()),
        output_shapes=[given.tail_keys.shape, given.tail_values.shape],
        output_dtypes=[dtype, dtype],
        grid=(-(-pieces // append.THREADS) * append.THREADS, 1, 1),
        threadgroup=(append.THREADS, 1, 1),
        template=(),
    )


def rotate_launch(language: Language, given: Rotate) -> Launch:
    tails, heads, _, k_dim = given.tail_keys.shape
    dtype, v_dim = given.tail_keys.dtype, given.tail_values.shape[-1]
    batch, tail_shapes = given.qkv.shape[0], (given.tail_keys.shape, given.tail_values.shape)
    sizes = (given.q_heads, heads, k_dim, v_dim, dtype.size)
    text = _rotate_text(language, *sizes, given.rotation, token_rows=given.token_rows is not None)
    copied = given.tail_keys.nbytes + given.tail_values.nbytes
    blocks = rotate.blocks(batch * given.q_heads, tails * heads, copied, append.PIECE)
    norms = ("query_weight", "key_weight")
    weights = {} if given.weights is None else dict(zip(norms, given.weights, strict=True))
    arrays = {
        "qkv": given.qkv,
        "offsets": given.offsets,
        "frequencies": given.frequencies,
        "tail_keys": given.tail_keys,
        "tail_values": given.tail_values,
        "places": given.token_places,
        **weights,
        **({} if given.token_rows is None else {"givers": given.token_rows}),
    }
    return Launch(
        name=kernel_name("rotate", text),
        input_names=tuple(arrays),
        output_names=("new_queries", "new_keys", "new_values"),
        source=text,
        header=language.header,
        inputs=list(arrays.values()),
        output_shapes=[(batch, given.q_heads, 1, k_dim), *tail_shapes],
        output_dtypes=[dtype, dtype, dtype],
        grid=(blocks * append.THREADS, 1, 1),
        threadgroup=(append.THREADS, 1, 1),
        template=(("T", dtype),),
    )


def provide(launch: Launch) -> bool:
    """Return whether MLX will run a launch's CUDA kernel from a module that kvd has compiled."""
    found: bool = _kernel_of(launch, CUDA).provide(
        launch.inputs, list(launch.template), launch.output_dtypes
    )
    return found


def _kernel_of(launch: Launch, language: Language) -> Any:
    names = launch.name, launch.input_names, launch.output_names
    return _kernel(language.name, *names, launch.source, launch.header, launch.template)


def run(launch: Launch, language: Language) -> list[mx.array]:
    found: list[mx.array] = _kernel_of(launch, language)(
        inputs=launch.inputs,
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
    )
    return found


def find_language() -> Language | None:
    if on_cpu():
        return None
    if mx.metal.is_available():
        return METAL
    return CUDA if mx.cuda.is_available() else None


def _pool_names(shape: Shape) -> list[str]:
    names = []
    for level, sides in enumerate(zip(shape.keys, shape.values, strict=True)):
        for side, side_name in zip(sides, ("key", "value"), strict=True):
            names.append(f"{side_name}s{level}")
            if side.packed:
                names += [f"{side_name}_scales{level}", f"{side_name}_biases{level}"]
    return names


@lru_cache(256)
def _split_plan(shape: Shape, language: Language) -> tuple[str, int, int]:
    """Return the kernel's text, its tiles and its warps."""
    return decode.split_source(shape, language), *shape.plan(language)


_combine_text = lru_cache(256)(decode.combine_source)
_append_text = lru_cache(256)(append.append_source)
_rotate_text = lru_cache(256)(rotate.rotate_source)


def _header(shape: Shape, language: Language, threads: int = 0) -> str:
    """Return the text before a kernel. ``threads``: per block, given for the split kernel only."""
    header = language.header + language.dense[shape.dtype]
    if threads and matrix.fits(shape, language):
        header += matrix.header(threads)
    return header


@lru_cache(256)
def kernel_name(part: str, text: str) -> str:
    # MLX finds a compiled kernel by its name, so the name covers all that the source depends on.
    return f"kvd_{part}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@lru_cache(256)
def _kernel(
    language: str,
    name: str,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    source: str,
    header: str,
    _template: tuple[tuple[str, mx.Dtype], ...],  # a `CudaKernel` is created once per template
) -> Any:
    if language == "cuda":
        return CudaKernel(name, input_names, output_names, source, header)
    return mx.fast.metal_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
    )
