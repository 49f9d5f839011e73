"""The kernels as `kvd.worker.attention.fused.Kernels`, in one language."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kvd.worker.attention.kernels import launch, launch_prefill
from kvd.worker.attention.kernels.arguments import (
    Append,
    Attention,
    Pack,
    PutTails,
    Rotate,
    Spread,
    Unpack,
)
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.shape import Shape


class Fused:
    """The kernels of decode steps and of prefill passes.

    A call adds one kernel to the graph; `decode_attention` adds two.
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
        (out,) = self._run(launch.combine_launch(shape, self.language, given, parts))
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

    def unpack(self, given: Unpack) -> tuple[mx.array, mx.array]:
        keys, values = self._run(launch_prefill.unpack_launch(self.language, given))
        return keys, values

    def gather(self, parts: Sequence[mx.array], rows: mx.array) -> mx.array:
        (found,) = self._run(launch_prefill.gather_launch(self.language, parts, rows))
        return found

    def put_tails(self, given: PutTails) -> tuple[mx.array, mx.array]:
        keys, values = self._run(launch_prefill.put_tails_launch(self.language, given))
        return keys, values

    def _run(self, given: launch.Launch) -> list[mx.array]:
        self.launches += 1
        return launch.run(given, self.language)
