"""Embeddings of the fake engine: functions of the text alone."""

from __future__ import annotations

import hashlib
import math

from protocol.embedding import EmbeddingInfo, EmbedOptions, vector_bytes
from protocol.errors import InvalidRequest
from protocol.types import Usage
from protocol.worker import RowFinished

INFO = EmbeddingInfo(pooling="last_token", dimensions=32)


def check_embed(options: EmbedOptions) -> None:
    if options.dimensions is not None and options.dimensions > INFO.dimensions:
        raise InvalidRequest(
            f"dimensions is {options.dimensions}; the model's vectors have {INFO.dimensions}",
            field="dimensions",
        )


def embedded(rid: str, prompt: bytes, options: EmbedOptions) -> RowFinished:
    """Return the report with the embedding of a prompt."""
    digest = hashlib.blake2b(prompt, digest_size=INFO.dimensions).digest()
    vector = [byte / 255 - 0.5 for byte in digest[: options.dimensions]]
    length = math.sqrt(sum(number * number for number in vector))
    return RowFinished(
        rid=rid,
        reason="stop",
        usage=Usage(len(prompt), 0, levels=[0]),
        embedding=vector_bytes([number / length for number in vector]),
    )
