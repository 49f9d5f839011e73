"""Ollama's error objects: ``{"error": "the message"}``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from protocol.errors import bounded

if TYPE_CHECKING:
    from kvd.http.errors import Refusal


def body(refusal: Refusal) -> bytes:
    return msgspec.json.encode({"error": bounded(refusal.message)})


def encoded(refusal: Refusal, _request_id: str) -> tuple[int, bytes]:
    """Return the status and the body of a refusal."""
    return refusal.status, body(refusal)
