"""Computes what the fused kernels compute, from the same arrays and with MLX's plain operations.

It therefore runs on the CPU and can be traced. It makes dense copies of all pages, and each row
attends to the pages that its splits list.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.arguments import Append, Attention, Rotate
from kvd.worker.attention.kernels.language import METAL
from kvd.worker.cache.packed import take, unpack
from kvd.worker.cache.scheme import PAGE_TOKENS, Packing


class StandIn:
    """Replaces `kvd.worker.attention.kernels.launch.Fused`."""

    def __init__(self, error: float = 0.0) -> None:
        self.launches = 0
        self.attended = 0
        """Calls of `decode_attention`, including those while a compiled step is traced."""
        self.rotated = 0
        """Calls of `rotate`, counted in the same way."""
        self.error = error
        """Relative error added to all results."""

    def backend(self) -> FusedBackend:
        """Return a backend that attends with this object."""
        return FusedBackend(self, METAL.most_buffers)

    def append(self, given: Append) -> tuple[mx.array, mx.array]:
        self.launches += 1
        tails = given.tail_keys.shape
        which = mx.arange(tails[0]) if given.token_rows is None else given.token_rows
        places = given.token_places[:, None]
        written = ((mx.arange(tails[2]) == places % tails[2]) & (places >= 0))[:, None, :, None]
        moved = (places >= tails[2])[:, :, None, None]
        half = tails[2] // 2
        found = []
        for new, tail in ((given.keys, given.tail_keys), (given.values, given.tail_values)):
            shifted = mx.concatenate([tail[:, :, half:], tail[:, :, half:]], axis=2)
            found.append(mx.where(written, new[which], mx.where(moved, shifted, tail)))
        return found[0], found[1]

    def rotate(self, given: Rotate) -> tuple[mx.array, mx.array, mx.array]:
        self.rotated += 1
        batch = given.qkv.shape[0]
        _, heads, _, k_dim = given.tail_keys.shape
        ends = [given.q_heads * k_dim, (given.q_heads + heads) * k_dim]
        *vectors, values = mx.split(given.qkv, ends, axis=-1)
        weights = given.weights or (None, None)
        queries, keys = (
            _rotated(given, one.reshape(batch, count, 1, -1), weight)
            for one, count, weight in zip(vectors, (given.q_heads, heads), weights, strict=True)
        )
        values = values.reshape(batch, heads, 1, -1)
        tails = given.tail_keys, given.tail_values
        return queries, *self.append(
            Append(*tails, keys, values, given.token_places, given.token_rows)
        )

    def decode_attention(self, given: Attention) -> mx.array:
        self.launches += 2
        self.attended += 1
        queries, pages, rows, splits = given.queries, given.pages, given.rows, given.splits
        tail_keys, tail_values, keep, sinks = (
            given.tail_keys, given.tail_values, given.keep, given.sinks,
        )  # fmt: skip
        batch, q_heads, _, k_dim = queries.shape
        count, heads = rows.shape[0], tail_keys.shape[1]
        # [rows, splits]: whether both arrays assign the split to the row.
        places = mx.arange(splits.shape[0])
        of_row = (splits[:, 0] == mx.arange(count)[:, None]) & (
            (places >= rows[:, 6:7]) & (places < rows[:, 7:8])
        )
        # [rows, pages]: how many of the row's splits contain the page.
        index = mx.arange(pages.shape[0])
        inside = (index >= splits[:, 1:2]) & (index < splits[:, 2:3]) & (splits[:, 3:4] == 0)
        held = of_row.astype(mx.float32) @ inside.astype(mx.float32)
        tails = (of_row & (splits[:, 3] == 1)).sum(1)

        if given.pools:
            keys, values = _dense(given)
        else:
            shape = (pages.shape[0], heads, PAGE_TOKENS)
            keys, values = mx.zeros((*shape, k_dim)), mx.zeros((*shape, tail_values.shape[-1]))
        lows = rows[:, 5:6]
        places = (pages[:, 2:3] + mx.arange(PAGE_TOKENS)).flatten()
        seen = mx.repeat(held, PAGE_TOKENS, 1) == 1
        seen = seen & ((places >= lows) | (places < keep))
        length = tail_keys.shape[2]
        places = rows[:, 2:3] + mx.arange(length)
        newest = (mx.arange(length) < rows[:, 1:2]) & (tails == 1)[:, None]
        newest = newest & ((places >= lows) | (places < keep))

        q = queries[:count].astype(mx.float32).reshape(count, heads, -1, k_dim) * given.scale
        keys = keys.swapaxes(0, 1).flatten(1, 2)  # [heads, tokens, dim]
        values = values.swapaxes(0, 1).flatten(1, 2)
        slots = rows[:, 0]
        own_keys, own_values = tail_keys[slots].astype(mx.float32), tail_values[slots]
        scores = mx.concatenate(
            [
                mx.where(seen[:, None, None], q @ keys.swapaxes(-1, -2)[None], -mx.inf),
                mx.where(newest[:, None, None], q @ own_keys.swapaxes(-1, -2), -mx.inf),
            ],
            axis=-1,
        )
        if sinks is not None:
            column = sinks.astype(mx.float32).reshape(1, heads, -1, 1)
            column = mx.broadcast_to(column, (*scores.shape[:-1], 1))
            scores = mx.concatenate([scores, column], axis=-1)
        weights = mx.softmax(scores, axis=-1)
        cut = keys.shape[1]
        found = weights[..., :cut] @ values[None]
        found = found + weights[..., cut : cut + length] @ own_values.astype(mx.float32)
        found = found.reshape(count, q_heads, 1, -1) * (1 + self.error)
        return mx.pad(found.astype(queries.dtype), [(0, batch - count), (0, 0), (0, 0), (0, 0)])


def _rotated(given: Rotate, x: mx.array, weight: mx.array | None) -> mx.array:
    rotation = given.rotation
    if weight is not None:
        x = mx.fast.rms_norm(x, weight, rotation.eps)
    return mx.fast.rope(
        x,
        rotation.dims,
        traditional=rotation.traditional,
        base=None,
        scale=1.0,
        offset=given.offsets,
        freqs=1 / given.frequencies,
    )


def _dense(given: Attention) -> tuple[mx.array, mx.array]:
    """Return the keys and the values of all pages, dense: ``[pages, heads, 64, dim]`` each."""
    left, pages = iter(given.pools), given.pages
    sides: list[list[mx.array]] = [[], []]
    for packings in zip(given.key_packings, given.value_packings, strict=True):
        for side, (bits, group, along_tokens) in enumerate(packings):
            level = len(sides[side])
            packing = Packing(bits, group, per_token=not along_tokens)
            packed = tuple(next(left) for _ in range(1 if bits == 16 else 3))
            slots = mx.where(pages[:, 0] == level, pages[:, 1], 0)
            dense = unpack(take(packed, slots), packing).astype(mx.float32)
            swapped = side == 0 or along_tokens
            sides[side].append(dense.swapaxes(-1, -2) if swapped else dense)
    found = []
    for dense_levels in sides:
        chosen = dense_levels[0]
        for level, dense in enumerate(dense_levels[1:], 1):
            chosen = mx.where((pages[:, 0] == level)[:, None, None, None], dense, chosen)
        found.append(chosen)
    return found[0], found[1]
