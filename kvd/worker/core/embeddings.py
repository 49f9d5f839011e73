"""Embeddings: pools the hidden states of a prompt while it is prefilled.

A request for an embedding is an ordinary request for one token whose prompt has one more token
than the text. The prompt is prefilled without its last token, which a decode step would take. The
request thus ends with the chunk that has the text's last token, and nothing is decoded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from kvd.worker.core.batch import Batch
from kvd.worker.core.request import Request
from kvd.worker.scheduling.scheduler import Chunk
from kvd.worker.serving.embedding_rules import EmbeddingRules
from protocol.embedding import EmbeddingInfo, EmbedOptions, Pooling, vector_bytes
from protocol.errors import ContextTooLong, InvalidRequest


def end_prompt(
    prompt: array[int], options: EmbedOptions, rules: EmbeddingRules, context_length: int
) -> int:
    """Append what the embedding of a text needs; return the number of the text's tokens.

    Raises `KvdError` if the model gives no such embedding.
    """
    info = rules.check()
    if options.dimensions is not None and options.dimensions > info.dimensions:
        raise InvalidRequest(
            f"dimensions is {options.dimensions}; the model's vectors have {info.dimensions}:"
            " send at most that",
            field="dimensions",
        )
    if rules.end and tuple(prompt[-len(rules.end) :]) != rules.end:
        prompt.extend(rules.end)
    if len(prompt) > context_length - 2:
        raise ContextTooLong(
            f"the text has {len(prompt)} tokens with its end token; the model embeds at most"
            f" {context_length - 2}: send a shorter text",
            prompt_tokens=len(prompt),
            context_length=context_length,
        )
    prompt.append(prompt[-1])
    return len(prompt) - 1


class Embeddings:
    """The requests for embeddings of one engine."""

    def __init__(self, batch: Batch, info: EmbeddingInfo | None) -> None:
        """``info``: None if the model gives no embeddings."""
        self._batch = batch
        self._kept: WeakKeyDictionary[Request, dict[int, mx.array]] = WeakKeyDictionary()
        """By request, and by the lengths before and after its chunks of the newest pass: the sum of
        the hidden states so far, or the first one, as the pooling is. A failed step repeats its
        chunks."""
        self._pooling: Pooling = "last_token" if info is None else info.pooling

    def pool(self, group: Sequence[tuple[Request, Chunk]], hidden: Sequence[mx.array]) -> None:
        """Take the hidden states of each chunk, ``[tokens, channels]``; end what is done.

        Requests without ``embed`` are ignored.
        """
        self._drop_older(group)
        for (request, chunk), states in zip(group, hidden, strict=True):
            if request.submit.embed is None:
                continue
            vector = self._pooled(request, chunk, states.astype(mx.float32))
            if vector is None:
                continue
            vector = normalized(vector[: request.submit.embed.dimensions])
            mx.eval(vector)
            if mx.isfinite(vector).all().item():
                request.choices.record_level(request.level)
                request.choices.embedding = _bytes(vector)
                self._batch.finish(request.rid, "stop")
            else:
                self._batch.fail_untrusted(request)

    def _drop_older(self, group: Sequence[tuple[Request, Chunk]]) -> None:
        """Keep only what a pass with these chunks continues from."""
        starts: dict[Request, int] = {}
        for request, chunk in group:
            starts.setdefault(request, chunk.start)
        for request, start in starts.items():
            if (before := self._kept.get(request, {}).get(start)) is not None:
                self._kept[request] = {start: before}

    def _pooled(self, request: Request, chunk: Chunk, states: mx.array) -> mx.array | None:
        """Return the pooled vector, ``[channels]`` float32, with the last chunk; else None."""
        length = len(request.prompt) - 1
        ended = chunk.end == length
        if self._pooling == "last_token":
            return states[-1] if ended else None
        before = self._kept.get(request, {}).get(chunk.start) if chunk.start else None
        kept = states[0] if self._pooling == "cls" else states.sum(axis=0)
        if before is not None:
            kept = before if self._pooling == "cls" else before + kept
        mx.eval(kept)
        self._kept.setdefault(request, {})[chunk.end] = kept
        if not ended:
            return None
        return kept / length if self._pooling == "mean" else kept


def _bytes(vector: mx.array) -> bytes:
    numbers: Any = vector.tolist()
    return vector_bytes(numbers)


def normalized(vector: mx.array) -> mx.array:
    """Return a vector of length 1; NaN for zeros, as for values that are not finite."""
    scaled = vector / mx.abs(vector).max()  # so that no square overflows or vanishes
    return scaled / mx.linalg.norm(scaled)
