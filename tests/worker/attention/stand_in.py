"""Computes what the fused kernels compute, from the same arrays and with MLX's plain operations.

It therefore runs on the CPU and can be traced. It makes dense copies of all pages, and each row
attends to the pages that its splits list.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.attention.fused import FusedBackend
from kvd.worker.attention.kernels.arguments import (
    Append,
    Attend,
    Attention,
    Heads,
    Pack,
    PassTokens,
    PutTails,
    Rotate,
    Spread,
    Tiling,
    Unpack,
)
from kvd.worker.attention.kernels.language import METAL
from kvd.worker.cache.packed import pack, take, unpack
from kvd.worker.cache.scheme import PAGE_TOKENS, Packing


class StandIn:
    """Replaces `kvd.worker.attention.kernels.fused.Fused`."""

    def __init__(self, error: float = 0.0) -> None:
        self.launches = 0
        self.attended = 0
        """Calls of `decode_attention`, including those while a compiled step is traced."""
        self.rotated = 0
        """Calls of `rotate`, counted in the same way."""
        self.spreads = 0
        """Calls of `spread`: layers of packed prefills."""
        self.combined = 0
        """Calls of `attend` with splits."""
        self.unpacks = 0
        """Calls of `unpack`."""
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

    def spread(self, given: Spread) -> tuple[mx.array, mx.array, mx.array]:
        self.launches += 1
        self.spreads += 1
        count, (k_dim, v_dim) = given.qkv.shape[0], given.dims
        ends = [given.q_heads * k_dim, (given.q_heads + given.kv_heads) * k_dim]
        *vectors, values = mx.split(given.qkv, ends, axis=-1)
        weights = given.weights or (None, None)
        queries, keys = (
            _rotated(given, one.reshape(count, heads, 1, -1), weight).squeeze(2)
            for one, heads, weight in zip(
                vectors, (given.q_heads, given.kv_heads), weights, strict=True
            )
        )
        return queries, keys, values.reshape(count, given.kv_heads, v_dim)

    def pack(self, given: Pack) -> list[mx.array]:
        self.launches += 1
        found = []
        if given.paged is not None:
            for side, packings in enumerate(given.packings):
                dense = mx.unflatten(_looked_up(given.tokens, given.paged, side), 0, (-1, 64))
                ((bits, group, along_tokens),) = packings
                dense = dense.transpose(0, 2, 3, 1) if along_tokens else dense.swapaxes(1, 2)
                found += pack(dense, Packing(bits, group, not along_tokens))
        return found + [_looked_up(given.tokens, given.kept, side) for side in (0, 1)]

    def unpack(self, given: Unpack) -> mx.array:
        self.launches += 1
        self.unpacks += 1
        arrays = iter(given.pools)
        levels = zip(given.key_packings, given.value_packings, strict=True)
        pages = [
            [[next(arrays) for _ in range(1 if bits == 16 else 3)] for bits, *_ in level]
            for level in levels
        ]
        for side, packings in enumerate((given.key_packings, given.value_packings)):
            dense = (given.dense_keys, given.dense_values)[side]
            dense[given.copied[:, 1]] = _looked_up(given.tokens, given.copied[:, 0], side)
            for number, (bits, group, along_tokens) in enumerate(packings):
                assert given.paged is not None
                for level, slot, row in given.paged.tolist():
                    if level == number:
                        one = take(tuple(pages[level][side]), mx.array([slot]))
                        page = unpack(one, Packing(bits, group, not along_tokens))[0]
                        order = (2, 0, 1) if along_tokens else (1, 0, 2)
                        dense[row : row + 64] = page.transpose(*order)
        return mx.ones((1,), mx.int32)

    def tiling(self, given: Heads) -> Tiling:
        return Tiling(64 * given.kv_heads // given.q_heads, False, given.kv_heads)

    def attend(self, given: Attend) -> mx.array:
        self.launches += 1
        q_heads, kv_heads = given.queries.shape[1], given.keys.shape[1]
        found: dict[int, mx.array] = {}
        entries: dict[int, mx.array] = {}
        for first, row, count, seen, own, *runs, entry, distance in given.tiles.tolist():
            ahead = max(0, seen + count - 1)
            earlier = [at for one in (0, 2) for at in range(runs[one], runs[one] + runs[one + 1])]
            sides = []
            for mine, dense in (
                (given.keys, given.dense_keys), (given.values, given.dense_values),
            ):  # fmt: skip
                parts = [dense[mx.array(earlier, mx.int32)]] if earlier else []
                joined = mx.concatenate([*parts, mine[own : own + ahead]]).astype(mx.float32)
                sides.append(mx.repeat(joined.swapaxes(0, 1), q_heads // kv_heads, 0))
            keys, values = sides
            if not keys.shape[1]:
                found[row] = mx.zeros((count, q_heads * values.shape[2]), given.queries.dtype)
                continue
            queries = given.queries[first : first + count].astype(mx.float32).swapaxes(0, 1)
            ends = len(earlier) + mx.maximum(0, seen + mx.arange(count))
            scores = queries @ keys.swapaxes(1, 2) * given.scale
            scores = mx.where(mx.arange(keys.shape[1]) < ends[:, None], scores, -mx.inf)
            attended = mx.softmax(scores, axis=-1) @ values
            found[row] = attended.swapaxes(0, 1).flatten(1).astype(given.queries.dtype)
            if entry >= 0:
                log_sums = mx.logsumexp(scores, axis=-1, keepdims=True)
                both = mx.concatenate([attended, log_sums], axis=-1).swapaxes(0, 1)
                entries |= {entry + at * distance: both[at] for at in range(count)}
        if given.splits is None:
            return mx.concatenate([found[row] for row in sorted(found)])
        assert sorted(entries) == [*range(given.splits.entries)]
        self.launches += 1
        self.combined += 1
        shape = given.tokens, q_heads * given.values.shape[2]
        assert given.splits.rows.shape == (given.tokens, 8)
        out = mx.zeros(shape, given.queries.dtype)
        for token, (first, end) in enumerate(given.splits.rows[:, 6:].tolist()):
            if first < end:
                some = mx.stack([entries[entry] for entry in range(first, end)])
                shares = mx.softmax(some[..., -1:], axis=0)
                out[token] = (shares * some[..., :-1]).sum(0).flatten().astype(out.dtype)
        return out

    def put_tails(self, given: PutTails) -> tuple[mx.array, mx.array]:
        self.launches += 1
        first, count = given.starts[:, 0], given.starts[:, 1]
        token = mx.arange(given.tail_keys.shape[2])
        index = mx.minimum(first[:, None] + token, given.kept_keys.shape[0] - 1)
        new = (token < count[:, None])[:, None, :, None]
        found = [
            mx.where(new, kept[index].swapaxes(1, 2), old)
            for kept, old in (
                (given.kept_keys, given.tail_keys),
                (given.kept_values, given.tail_values),
            )
        ]
        return found[0], found[1]

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


def _rotated(given: Rotate | Spread, x: mx.array, weight: mx.array | None) -> mx.array:
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


def _looked_up(tokens: PassTokens, places: mx.array, side: int) -> mx.array:
    """Return keys (side 0) or values at places, ``[places, heads, dim]``."""
    own = (tokens.keys, tokens.values)[side]
    tails = (tokens.tail_keys, tokens.tail_values)[side].swapaxes(1, 2).flatten(0, 1)
    theirs = tails[mx.maximum(-1 - places, 0)]
    return mx.where((places >= 0)[:, None, None], own[mx.maximum(places, 0)], theirs)


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
