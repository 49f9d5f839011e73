"""Embeddings: what a request asks for, what a model offers, and vectors as bytes."""

from __future__ import annotations

import sys
from array import array
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol import fields
from protocol.fields import PositiveCount
from protocol.message_base import RequestBase

Pooling = Literal["last_token", "mean", "cls"]
"""How the hidden states of a text become one vector: that of its last token, their mean, or that
of its first token."""
EmbeddingsMode = Literal["auto", "any"]
"""Which models give embeddings: ``auto``: those that were trained for it; ``any``: also others."""


class EmbedOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request for an embedding asks for, besides its text."""

    dimensions: PositiveCount | None = None
    """Numbers of the vector: its first ones, normalized again; absent: all."""


class EmbeddingInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Embeddings that a model gives."""

    pooling: Pooling
    dimensions: Annotated[int, Meta(ge=1)]
    """Numbers of a vector."""


class Embed(RequestBase, tag="embed", frozen=True, kw_only=True):
    """Return the embedding of a text, given as exactly one of ``prompt`` and ``tokens``.

    The model's end token is appended if the model expects it and the text does not end with it.
    """

    model: fields.Name
    """Name of a loaded or known embedding model."""
    prompt: str | None = None
    """Raw text."""
    tokens: list[fields.TokenId] | None = None
    """Token ids."""
    dimensions: PositiveCount | None = None
    """Numbers of the vector, at most the model's: its first ones, normalized again; absent: all."""
    priority: fields.Priority = 0
    """Priority in the queue; higher values are admitted first."""
    deadline_s: fields.DeadlineSeconds | None = None
    """Seconds from arrival after which the request ends with ``deadline_exceeded``."""
    keep_alive_s: fields.KeepAliveSeconds | None = None
    """Idle limit of the model until it is unloaded, seconds; negative: none; absent: unchanged."""


def vector_bytes(vector: list[float]) -> bytes:
    """Return a vector as float32, little endian."""
    return _little_endian(array("f", vector)).tobytes()


def vector_of(content: bytes) -> list[float]:
    """Return the numbers of `vector_bytes`."""
    return _little_endian(array("f", content)).tolist()


def _little_endian(numbers: array[float]) -> array[float]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
