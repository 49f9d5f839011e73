"""The kernels as `kvd.worker.attention.fused.Kernels`, in one language."""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.attention.kernels import attend, launch, launch_prefill
from kvd.worker.attention.kernels.arguments import (
    Append,
    Attend,
    Attention,
    Heads,
    Pack,
    PutTails,
    Rotate,
    Spread,
    Tiling,
    Unpack,
)
from kvd.worker.attention.kernels.language import CUDA, Language
from kvd.worker.attention.kernels.shape import Shape


def has_group_products() -> bool:
    """Return whether kvd compiles for a device that runs `group_products`."""
    found = modules.current()
    return found is not None and found.architecture == f"sm_{modules.HOPPER}a"


def _example(heads: Heads) -> launch.Launch:
    """Return a launch of the kernel that needs a module of kvd's."""
    queries, keys, values = (
        mx.zeros((1, count, dim), heads.dtype)
        for count, dim in (
            (heads.q_heads, heads.k_dim),
            (heads.kv_heads, heads.k_dim),
            (heads.kv_heads, heads.v_dim),
        )
    )
    tiles, ready = mx.zeros((1, attend.COLUMNS), mx.int32), mx.zeros((1,), mx.int32)
    given = Attend(
        queries, keys, values, keys, values, ready, tiles, None, 1, heads.scale, warpgroups=True
    )
    return launch_prefill.attend_launch(CUDA, given)


class Fused:
    """The kernels of decode steps and of prefill passes.

    A call adds one kernel to the graph; `decode_attention` adds two, as `attend` does with splits.
    """

    def __init__(self, language: Language) -> None:
        self.language = language
        self.launches = 0

    def decode_attention(self, given: Attention) -> mx.array:
        q_heads, kv_heads = given.queries.shape[1], given.tail_keys.shape[1]
        shape = Shape(
            given.queries.dtype,
            given.queries.shape[3],
            given.tail_values.shape[3],
            kv_heads,
            q_heads // kv_heads,
            given.queries.shape[2],
            launch.sides_of(given.key_packings),
            launch.sides_of(given.value_packings),
            given.scale,
            given.keep,
            given.sinks is not None,
            tuple(zip(*map(launch.sides_of, given.schemes), strict=True)),
        )
        (parts,) = self._run(launch.split_launch(shape, self.language, given))
        rows = given.rows, given.queries.shape[0], given.sinks
        (out,) = self._run(launch.combine_launch(shape, self.language, parts, *rows))
        return out

    def append(self, given: Append) -> tuple[mx.array, mx.array]:
        keys, values = self._run(launch.append_launch(self.language, given))
        return keys, values

    def rotate(self, given: Rotate) -> tuple[mx.array, mx.array, mx.array]:
        queries, keys, values = self._run(launch.rotate_launch(self.language, given))
        return queries, keys, values

    def spread(self, given: Spread) -> tuple[mx.array, mx.array, mx.array]:
        queries, keys, values = self._run(launch_prefill.spread_launch(self.language, given))
        return queries, keys, values

    def pack(self, given: Pack) -> list[mx.array]:
        return self._run(launch_prefill.pack_launch(self.language, given))

    def unpack(self, given: Unpack) -> mx.array:
        (done,) = self._run(launch_prefill.unpack_launch(self.language, given))
        return done

    def tiling(self, given: Heads) -> Tiling | None:
        if not self.language.matrix:
            return None
        # MLX cannot compile ``wgmma``, so that kernel is used only if its module is in place.
        for warpgroups in (True, False) if has_group_products() else (False,):
            tokens = attend.AttendShape(given, warpgroups).tile_tokens
            if tokens and (not warpgroups or launch.provide(_example(given))):
                return Tiling(tokens, warpgroups, given.kv_heads)
        return None

    def attend(self, given: Attend) -> mx.array:
        out, parts = self._run(launch_prefill.attend_launch(self.language, given))
        if given.splits is None:
            return out
        combine = launch_prefill.combine_launch(self.language, given, parts)
        return self._run(combine)[0].reshape(given.tokens, -1)

    def put_tails(self, given: PutTails) -> tuple[mx.array, mx.array]:
        keys, values = self._run(launch_prefill.put_tails_launch(self.language, given))
        return keys, values

    def _run(self, given: launch.Launch) -> list[mx.array]:
        self.launches += 1
        return launch.run(given, self.language)
