"""From a decode step's arrays to two launches, and to MLX."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from kvd.worker.attention.kernels import append, decode, matrix
from kvd.worker.attention.kernels.language import CUDA, METAL, Language
from kvd.worker.attention.kernels.shape import LANES, Shape, Side

Told = Sequence[tuple[int, int, bool]]
"""For each level, bits, group, and whether groups run along the page's tokens."""


@dataclass(frozen=True)
class Launch:
    """A kernel and what it is given; nothing is compiled or run by making it."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    inputs: list[mx.array]
    output_shapes: list[tuple[int, ...]]
    output_dtypes: list[mx.Dtype]
    grid: tuple[int, int, int]
    """In threads."""
    threadgroup: tuple[int, int, int]
    template: tuple[tuple[str, mx.Dtype], ...]


class Fused:
    """Attention of decode steps by kernels, two a layer."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.launches = 0
        """Kernels that were put into graphs so far."""

    def decode_attention(
        self,
        queries: mx.array,
        pages: mx.array,
        tail_keys: mx.array,
        tail_values: mx.array,
        rows: mx.array,
        splits: mx.array,
        pools: Sequence[mx.array],
        key_told: Told,
        value_told: Told,
        scale: float,
        keep: int,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend the newest tokens of rows to all that they see.

        ``queries``: ``[batch, q_heads, L, k_dim]``, of the newest tokens, all of them in the tails,
        rows first, then padding; ``pages [n, 3]``
        int32: level, slot, position of the first token; tails ``[tails, kv_heads, 192, dim]``;
        ``rows [rows, 8]`` int32: slot of the tail, tokens in it, position of its first token,
        first page, end page, the first position that the newest token sees beside the ``keep``
        first ones (those before it see one more each), first split, end split; ``splits [n, 4]``
        int32: row or -1, first page, end page, whether it is the tail. ``pools``: the arrays of
        each level, packed as told. ``sinks``: ``[q_heads]`` logits. Returns
        ``[batch, q_heads, L, v_dim]`` in the queries' dtype, zero for the padding.
        """
        batch, q_heads, count, k_dim = queries.shape
        kv_heads = tail_keys.shape[1]
        shape = Shape(
            queries.dtype,
            k_dim,
            tail_values.shape[-1],
            kv_heads,
            q_heads // kv_heads,
            count,
            tuple(Side(*one) for one in key_told),
            tuple(Side(*one) for one in value_told),
            scale,
            keep,
            sinks is not None,
        )
        split = split_launch(
            shape, self.language, queries, pages, tail_keys, tail_values, rows, splits, pools
        )
        outputs, weights = self._fire(split)
        joined = combine_launch(shape, self.language, batch, outputs, weights, rows, sinks)
        return self._fire(joined)[0]

    def append(
        self,
        tail_keys: mx.array,
        tail_values: mx.array,
        keys: mx.array,
        values: mx.array,
        places: mx.array,
        givers: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """Return tails with a token of each row in its place.

        Tails ``[tails, kv_heads, 192, dim]``; tokens ``[rows or more, kv_heads, 1, dim]``;
        ``places [tails]`` int32: where each tail takes one, or -1; ``givers [tails]``: from which
        row, None if the rows are the tails in their order.
        """
        launch = append_launch(self.language, tail_keys, tail_values, keys, values, places, givers)
        new_keys, new_values = self._fire(launch)
        return new_keys, new_values

    def _fire(self, launch: Launch) -> list[mx.array]:
        self.launches += 1
        return fire(launch, self.language)


def split_launch(
    shape: Shape,
    language: Language,
    queries: mx.array,
    pages: mx.array,
    tail_keys: mx.array,
    tail_values: mx.array,
    rows: mx.array,
    splits: mx.array,
    pools: Sequence[mx.array],
) -> Launch:
    """Return the launch that attends to each split for itself.

    Its outputs: sums ``[splits, kv_heads, vectors, v_dim]``, and maximum (of base-2 logits) and
    sum of weights ``[splits, kv_heads, vectors, 2]``; float32, undefined for padding.
    """
    text, tiles, warps = _split_text(shape, language)
    count, each = splits.shape[0], (shape.kv_heads, shape.vectors)
    names = ["queries", "pages", "tail_keys", "tail_values", "rows", "splits", *_pool_names(shape)]
    return Launch(
        name=_name("split", text),
        input_names=tuple(names),
        output_names=("outputs", "weights"),
        source=text,
        header=_header(shape, language, warps * LANES),
        inputs=[queries, pages, tail_keys, tail_values, rows, splits, *pools],
        output_shapes=[(count, *each, shape.v_dim), (count, *each, 2)],
        output_dtypes=[mx.float32, mx.float32],
        grid=(count * warps * LANES, shape.kv_heads, -(-shape.tiles // tiles)),
        threadgroup=(warps * LANES, 1, 1),
        template=(("T", shape.dtype),),
    )


def combine_launch(
    shape: Shape,
    language: Language,
    batch: int,
    outputs: mx.array,
    weights: mx.array,
    rows: mx.array,
    sinks: mx.array | None,
) -> Launch:
    """Return the launch that joins the splits of each row, ``[batch, q_heads, L, v_dim]``."""
    text, threads = _combine_text(shape, language)
    q_heads = shape.kv_heads * shape.repeats
    extra = [] if sinks is None else [sinks]
    return Launch(
        name=_name("combine", text),
        input_names=("outputs", "weights", "rows", *(["sinks"] if extra else [])),
        output_names=("out",),
        source=text,
        header=_header(shape, language),
        inputs=[outputs, weights, rows, *extra],
        output_shapes=[(batch, q_heads, shape.queries, shape.v_dim)],
        output_dtypes=[shape.dtype],
        grid=(batch * q_heads * shape.queries * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=(("T", shape.dtype),),
    )


def append_launch(
    language: Language,
    tail_keys: mx.array,
    tail_values: mx.array,
    keys: mx.array,
    values: mx.array,
    places: mx.array,
    givers: mx.array | None,
) -> Launch:
    """Return the launch that copies tails, and puts a token of each row in its place."""
    _, heads, _, k_dim = tail_keys.shape
    dtype, v_dim = tail_keys.dtype, tail_values.shape[-1]
    text = _append_text(language, heads, k_dim, v_dim, dtype.size, givers is not None)
    pieces = (tail_keys.nbytes + tail_values.nbytes) // append.PIECE
    extra = [] if givers is None else [givers]
    return Launch(
        name=_name("append", text),
        input_names=(
            *("tail_keys", "tail_values", "keys", "values", "places"),
            *(["givers"] if extra else []),
        ),
        output_names=("new_keys", "new_values"),
        source=text,
        header=language.header,
        inputs=[tail_keys, tail_values, keys, values, places, *extra],
        output_shapes=[tail_keys.shape, tail_values.shape],
        output_dtypes=[dtype, dtype],
        grid=(-(-pieces // append.THREADS) * append.THREADS, 1, 1),
        threadgroup=(append.THREADS, 1, 1),
        template=(),
    )


def fire(launch: Launch, language: Language) -> list[mx.array]:
    """Give a launch to MLX; lazy."""
    kernel = _kernel(
        language.name,
        launch.name,
        launch.input_names,
        launch.output_names,
        launch.source,
        launch.header,
    )
    found: list[mx.array] = kernel(
        inputs=launch.inputs,
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=launch.output_shapes,
        output_dtypes=launch.output_dtypes,
    )
    return found


def find_language() -> Language | None:
    """Return the language of the default device; None: it has no kernels."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return None
    if mx.metal.is_available():
        return METAL
    return CUDA if mx.cuda.is_available() else None


def _pool_names(shape: Shape) -> list[str]:
    names = []
    for level, sides in enumerate(zip(shape.keys, shape.values, strict=True)):
        for side, what in zip(sides, ("key", "value"), strict=True):
            names.append(f"{what}s{level}")
            if side.packed:
                names += [f"{what}_scales{level}", f"{what}_biases{level}"]
    return names


@lru_cache(64)
def _split_text(shape: Shape, language: Language) -> tuple[str, int, int]:
    tiles, warps = shape.plan(language)
    return decode.split_source(shape, language), tiles, warps


@lru_cache(64)
def _append_text(
    language: Language, heads: int, k_dim: int, v_dim: int, itemsize: int, givers: bool
) -> str:
    return append.append_source(language, heads, k_dim, v_dim, itemsize, givers=givers)


@lru_cache(64)
def _combine_text(shape: Shape, language: Language) -> tuple[str, int]:
    return decode.combine_source(shape, language), decode.combine_threads(shape)


def _header(shape: Shape, language: Language, threads: int = 0) -> str:
    """Return what comes before a kernel; ``threads``: of a block that attends to pages."""
    header = language.header + language.dense[shape.dtype]
    if threads and matrix.fits(shape, language):
        header += matrix.header(threads)
    return header


@lru_cache(256)
def _name(part: str, text: str) -> str:
    # MLX finds a compiled kernel by its name: all that its source depends on is in there.
    return f"kvd_{part}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@lru_cache(64)
def _kernel(
    language: str,
    name: str,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    source: str,
    header: str,
) -> Any:
    make = mx.fast.metal_kernel if language == "metal" else mx.fast.cuda_kernel
    return make(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
    )
