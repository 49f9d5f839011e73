"""Attention of a packed prefill: each chunk attends as if its pass had no other chunk.

A chunk attends to its row's pages, to the tail before it, and to itself. If the pass has several
chunks of one row, a later one sees the pages that earlier ones fill as the cache will store them:
quantized. Results are therefore equal to those of separate passes, on the CPU to the bit.

Some devices make a plan for each new shape of attention (`attention_is_planned`), which takes long.
There, chunks are padded to few widths.

The first chunks of rows attend only to themselves. On CUDA, `TOGETHER` of the same width do so in
one call. On the CPU, rounding would depend on it; on Metal it was not tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import cast

import mlx.core as mx

from kvd.worker.attention.prefill import Copies, prefill_attention, starts_attention
from kvd.worker.cache import padded_sizes
from kvd.worker.cache.batch import PackedHandle, PrefillHandle
from kvd.worker.cache.steps import PackedPrefill, PrefillStep

TOGETHER = 4
"""First chunks in one call. With any number of them, there would be too many shapes to plan."""


def packed_attention(
    queries: mx.array, handle: PackedHandle, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Attend the queries of all chunks, ``[batch, q_heads, 1, k_dim]``, causally.

    ``sinks``: ``[q_heads]`` logits of gpt-oss's attention sinks. Returns
    ``[batch, q_heads, 1, v_dim]``, lazy as far as the scratch allows. Outputs of the padding are 0.
    """
    together = queries.swapaxes(0, 2)  # [1, q_heads, batch, k_dim]
    starts, outputs = _attend_starts(queries, handle, scale, sinks)  # [tokens, q_heads, v_dim]
    attended = set(chain.from_iterable(some.chunks for some in starts))
    copies: Copies = {}
    for index, (part, where) in enumerate(zip(handle.parts, handle.step.parts(), strict=True)):
        if index in attended:
            continue
        if not part.step.continues:
            copies = {}
        continued = index + 1 < len(handle.parts) and handle.parts[index + 1].step.continues
        output = prefill_attention(
            _padded(together[:, :, where], part),
            part,
            scale,
            sinks,
            pending=outputs,
            copies=copies if continued or part.step.continues else None,
        )
        outputs.append(output[:, :, : part.step.count].squeeze(0).swapaxes(0, 1))
    if missing := handle.step.batch - sum(part.step.count for part in handle.parts):
        outputs.append(mx.zeros((missing, *outputs[0].shape[1:]), outputs[0].dtype))
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    if starts:
        joined = mx.take(joined, _order_of(handle.step, starts), 0)
    return joined[:, :, None]


@dataclass(frozen=True)
class _Starts:
    """First chunks of rows that are padded to the same width."""

    chunks: tuple[int, ...]
    """Their numbers in the pass."""
    width: int
    places: mx.array
    """``[chunks * width]`` int32: where their tokens are in the batch. Padding repeats the last."""

    def of(self, side: mx.array) -> mx.array:
        """Return the chunks of a pass's queries, keys or values, ``[batch, heads, 1, dim]``.

        The result is ``[chunks, heads, width, dim]``.
        """
        tokens = mx.take(side.squeeze(2), self.places, 0)
        return mx.unflatten(tokens, 0, (len(self.chunks), -1)).swapaxes(1, 2)


def _attend_starts(
    queries: mx.array, handle: PackedHandle, scale: float, sinks: mx.array | None
) -> tuple[list[_Starts], list[mx.array]]:
    """Attend the chunks that are attended together.

    Return which, and their outputs with padding, in parts of whole chunks:
    ``[chunks * width, q_heads, v_dim]``.
    """
    found, outputs = list[_Starts](), list[mx.array]()
    for starts in _starts_of(handle.step):
        attended = starts_attention(
            starts.of(queries),
            starts.of(handle.keys),
            starts.of(handle.values),
            handle.parts[starts.chunks[0]],
            scale,
            sinks,
            at_once=TOGETHER,
            pending=outputs,
        )
        if attended is not None:
            found.append(starts)
            outputs += [some.swapaxes(1, 2).flatten(0, 1) for some in attended]
    return found, outputs


def _starts_of(step: PackedPrefill) -> list[_Starts]:
    """Return the first chunks of rows that are attended together; the same for each layer."""
    if "starts" not in step.shared:
        by_width = defaultdict[int, list[int]](list)
        for index, one in enumerate(step.steps if joins_starts() else ()):
            if one.offset == 0 and one.backend is None:
                by_width[_width(one)].append(index)
        # Whole groups: attention is planned for each number of chunks.
        whole = {
            width: chunks[: len(chunks) // TOGETHER * TOGETHER]
            for width, chunks in by_width.items()
        }
        step.shared["starts"] = [
            _Starts(tuple(some), width, mx.array(_tokens_of(step, some, width)))
            for width, some in whole.items()
            if some
        ]
    return cast("list[_Starts]", step.shared["starts"])


def _tokens_of(step: PackedPrefill, chunks: Sequence[int], width: int) -> list[int]:
    """Return where the tokens of chunks are in the batch; padding repeats a chunk's last one."""
    parts = [range(step.batch)[part] for part in step.parts()]
    some = (parts[chunk] for chunk in chunks)
    return [token for part in some for token in chain(part, repeat(part[-1], width - len(part)))]


def _order_of(step: PackedPrefill, starts: Sequence[_Starts]) -> mx.array:
    """Return where each token's output is among those of ``starts`` and of the other chunks.

    ``[batch]`` int32, the same for each layer.
    """
    key = f"order {[some.width for some in starts]}"
    if key not in step.shared:
        places = dict[int, int]()
        end = 0
        for some in starts:
            for chunk in some.chunks:
                places[chunk], end = end, end + some.width
        order: list[int] = []
        for index, one in enumerate(step.steps):
            start = places.get(index, end)
            order += range(start, start + one.count)
            end += one.count * (index not in places)
        order += range(end, end + step.batch - len(order))
        step.shared[key] = mx.array(order, mx.int32)
    return cast("mx.array", step.shared[key])


def joins_starts() -> bool:
    """Return whether first chunks are attended together."""
    return padded_sizes.attention_is_planned()


def _width(step: PrefillStep) -> int:
    """Return the number of queries of a chunk, padded if the device plans attention for each."""
    if step.backend is not None or not padded_sizes.attention_is_planned():
        return step.count
    return padded_sizes.padded_width(step.count)


def _padded(queries: mx.array, part: PrefillHandle) -> mx.array:
    """Pad a chunk's queries to its width."""
    missing = _width(part.step) - part.step.count
    return mx.pad(queries, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else queries
