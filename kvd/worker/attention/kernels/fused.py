"""The kernels as `kvd.worker.attention.fused.Kernels`, in one language."""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.attention.kernels import attend, launch, launch_prefill
from kvd.worker.attention.kernels.arguments import (
    Append,
    Attend,
    Attention,
    Pack,
    PutTails,
    Rotate,
    Spread,
    Unpack,
)
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.shape import Shape


def has_group_products() -> bool:
    """Return whether this process compiles kernels for a device that runs `group_products`.

    MLX cannot compile them itself, so they are not used once kvd's compiler has failed.
    """
    found = modules.current()
    hopper = f"sm_{modules.HOPPER}a"
    return found is not None and found.architecture == hopper and not found.failed


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

    def unpack(self, given: Unpack) -> mx.array:
        (done,) = self._run(launch_prefill.unpack_launch(self.language, given))
        return done

    def tile_tokens(self, dtype: mx.Dtype, group: int, k_dim: int, v_dim: int) -> int:
        if not self.language.matrix:
            return 0
        groups = has_group_products()
        return attend.AttendShape(group, 1, k_dim, v_dim, dtype, 1.0, groups).tile_tokens

    def attend(self, given: Attend) -> mx.array:
        groups = has_group_products()
        (found,) = self._run(launch_prefill.attend_launch(self.language, given, groups=groups))
        return found

    def put_tails(self, given: PutTails) -> tuple[mx.array, mx.array]:
        keys, values = self._run(launch_prefill.put_tails_launch(self.language, given))
        return keys, values

    def _run(self, given: launch.Launch) -> list[mx.array]:
        self.launches += 1
        return launch.run(given, self.language)
