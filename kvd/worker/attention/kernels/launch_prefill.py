"""Turns a prefill pass's arrays into kernel launches; see `kvd.worker.attention.fused_prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from kvd.worker.attention.kernels import append, attend, launch, pack, put_tails, spread, unpack
from kvd.worker.attention.kernels.arguments import (
    Attend,
    Heads,
    Pack,
    PassTokens,
    PutTails,
    Spread,
    Unpack,
)
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.launch import Launch, kernel_name, sides_of
from kvd.worker.attention.kernels.shape import Shape, Side
from kvd.worker.cache.scheme import PAGE_TOKENS

THREADGROUP = (append.THREADS, 1, 1)
Outputs = dict[str, tuple[tuple[int, ...], mx.Dtype]]
"""Shapes and dtypes by name."""


def spread_launch(language: Language, given: Spread) -> Launch:
    tokens, dtype = given.qkv.shape[0], given.qkv.dtype
    k_dim, v_dim = given.dims
    text = _spread_text(language, given.q_heads, given.kv_heads, k_dim, v_dim, given.rotation)
    names = ("query_weight", "key_weight")
    weights = {} if given.weights is None else dict(zip(names, given.weights, strict=True))
    arrays = {
        "qkv": given.qkv,
        "offsets": given.offsets,
        "frequencies": given.frequencies,
        **weights,
    }
    outputs: Outputs = {
        "new_queries": ((tokens, given.q_heads, k_dim), dtype),
        "new_keys": ((tokens, given.kv_heads, k_dim), dtype),
        "new_values": ((tokens, given.kv_heads, v_dim), dtype),
    }
    blocks = spread.blocks(tokens, given.q_heads, given.kv_heads)
    return _launch("spread", language, text, arrays, outputs, blocks, dtype)


def pack_launch(language: Language, given: Pack) -> Launch:
    tokens, dtype = given.tokens, given.tokens.keys.dtype
    heads, dims = _heads_and_dims(tokens)
    sides = None
    if given.paged is not None:
        (key_side,), (value_side,) = map(sides_of, given.packings)
        sides = key_side, value_side
    text = _pack_text(language, heads, dims, sides, dtype.size)
    arrays, pages = {**_token_arrays(tokens), "kept": given.kept}, 0
    outputs: Outputs = {}
    if given.paged is not None and sides is not None:
        arrays["paged"] = given.paged
        pages = given.paged.shape[0] // PAGE_TOKENS
        for name, dim, side in zip(pack.NAMES, dims, sides, strict=True):
            lines, length = (dim, PAGE_TOKENS) if side.along_tokens else (PAGE_TOKENS, dim)
            if side.packed:
                words = length * side.bits // 32
                outputs[f"{name}_page"] = (pages, heads, lines, words), mx.uint32
                for about in ("scales", "biases"):
                    outputs[f"{name}_{about}"] = (pages, heads, lines, length // side.group), dtype
            else:
                outputs[f"{name}_page"] = (pages, heads, lines, length), dtype
    kept = given.kept.shape[0]
    for name, dim in zip(pack.NAMES, dims, strict=True):
        outputs[f"kept_{name}"] = (kept, heads, dim), dtype
    blocks = pack.blocks(pages, kept, heads, dims, sides or (), dtype.size)
    return _launch("pack", language, text, arrays, outputs, blocks, dtype)


def unpack_launch(language: Language, given: Unpack) -> Launch:
    tokens, dtype = given.tokens, given.tokens.keys.dtype
    heads, dims = _heads_and_dims(tokens)
    levels = tuple(zip(sides_of(given.key_packings), sides_of(given.value_packings), strict=True))
    text = _unpack_text(language, heads, dims, levels, dtype.size)
    arrays, pages = {**_token_arrays(tokens), "copied": given.copied}, 0
    arrays |= zip(unpack.WRITTEN, (given.dense_keys, given.dense_values), strict=True)
    arrays["after"] = given.after
    if given.paged is not None:
        pages = given.paged.shape[0]
        arrays |= {"paged": given.paged, **dict(zip(_pool_names(levels), given.pools, strict=True))}
    outputs: Outputs = {"done": ((1,), mx.int32)}
    blocks = unpack.blocks(pages, given.copied.shape[0], heads, dims, dtype.size)
    return _launch("unpack", language, text, arrays, outputs, blocks, dtype)


def attend_launch(language: Language, given: Attend) -> Launch:
    """Return the launch that attends.

    It writes one of its two outputs: ``out`` without splits, ``[tokens, q_heads * v_dim]``, and
    ``parts`` with splits, ``[entries, q_heads, v_dim + 2]`` float32, for `combine_launch`.
    """
    heads = _heads_of(given)
    shape = attend.AttendShape(heads, given.warpgroups)
    dtype, width = heads.dtype, heads.q_heads * heads.v_dim
    outputs = [(given.tokens, width), (1,)]
    if given.splits is not None:
        outputs = [(1,), (given.splits.entries, heads.q_heads, attend.vector_floats(heads))]
    text = _attend_text(language, shape)
    arrays = {
        "queries": given.queries,
        "keys": given.keys,
        "values": given.values,
        "dense_keys": given.dense_keys,
        "dense_values": given.dense_values,
        "ready": given.ready,
        "tiles": given.tiles,
    }
    return Launch(
        name=kernel_name("attend", text),
        input_names=tuple(arrays),
        output_names=("out", "parts"),
        source=text,
        header=language.header + attend.header(shape),
        inputs=list(arrays.values()),
        output_shapes=outputs,
        output_dtypes=[dtype, mx.float32],
        grid=(given.tiles.shape[0] * shape.threads, heads.kv_heads, 1),
        threadgroup=(shape.threads, 1, 1),
        template=(("T", dtype),),
    )


def combine_launch(language: Language, given: Attend, parts: mx.array) -> Launch:
    """Return the launch that combines the splits, ``[tokens, q_heads, 1, v_dim]``.

    Decode steps use the same kernel. ``parts``: the second output of `attend_launch`.
    """
    assert given.splits is not None
    heads = _heads_of(given)
    repeats = heads.q_heads // heads.kv_heads
    dims = heads.k_dim, heads.v_dim, heads.kv_heads, repeats
    shape = Shape(heads.dtype, *dims, 1, (), (), heads.scale)
    return launch.combine_launch(shape, language, parts, given.splits.rows, given.tokens)


def put_tails_launch(language: Language, given: PutTails) -> Launch:
    _, heads, _, k_dim = given.tail_keys.shape
    dtype, v_dim = given.tail_keys.dtype, given.tail_values.shape[-1]
    text = _put_tails_text(language, heads, k_dim, v_dim, dtype.size)
    arrays = {
        "tail_keys": given.tail_keys,
        "tail_values": given.tail_values,
        "kept_keys": given.kept_keys,
        "kept_values": given.kept_values,
        "starts": given.starts,
    }
    outputs: Outputs = {
        "new_keys": (given.tail_keys.shape, dtype),
        "new_values": (given.tail_values.shape, dtype),
    }
    pieces = (given.tail_keys.nbytes + given.tail_values.nbytes) // append.PIECE
    blocks = -(-pieces // append.THREADS)
    return _launch("put_tails", language, text, arrays, outputs, blocks, dtype)


def _launch(
    part: str,
    language: Language,
    text: str,
    arrays: dict[str, mx.array],
    outputs: Outputs,
    blocks: int,
    dtype: mx.Dtype,
) -> Launch:
    return Launch(
        name=kernel_name(part, text),
        input_names=tuple(arrays),
        output_names=tuple(outputs),
        source=text,
        header=language.header,
        inputs=list(arrays.values()),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[of for _, of in outputs.values()],
        grid=(blocks * append.THREADS, 1, 1),
        threadgroup=THREADGROUP,
        template=(("T", dtype),),
    )


def _heads_of(given: Attend) -> Heads:
    (_, q_heads, k_dim), (_, kv_heads, v_dim) = given.queries.shape, given.values.shape
    return Heads(given.queries.dtype, q_heads, kv_heads, k_dim, v_dim, given.scale)


def _heads_and_dims(tokens: PassTokens) -> tuple[int, tuple[int, int]]:
    return tokens.keys.shape[1], (tokens.keys.shape[2], tokens.values.shape[2])


def _token_arrays(tokens: PassTokens) -> dict[str, mx.array]:
    return {
        "keys": tokens.keys,
        "values": tokens.values,
        "tail_keys": tokens.tail_keys,
        "tail_values": tokens.tail_values,
    }


def _pool_names(levels: Sequence[tuple[Side, Side]]) -> list[str]:
    names = []
    for level, sides in enumerate(levels):
        for side, name in zip(sides, pack.NAMES, strict=True):
            names.append(f"{name}{level}")
            if side.packed:
                names += [f"{name}_scales{level}", f"{name}_biases{level}"]
    return names


_spread_text = lru_cache(256)(spread.spread_source)
_pack_text = lru_cache(256)(pack.pack_source)
_unpack_text = lru_cache(256)(unpack.unpack_source)
_attend_text = lru_cache(256)(attend.attend_source)
_put_tails_text = lru_cache(256)(put_tails.put_tails_source)
