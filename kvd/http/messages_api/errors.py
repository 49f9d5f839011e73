"""Anthropic's error objects: HTTP status and type for each refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from protocol.errors import bounded

if TYPE_CHECKING:
    from kvd.http.errors import Refusal

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types by status. Others: ``invalid_request_error`` below 500, and ``api_error`` above."""


def status_of(refusal: Refusal) -> int:
    """Return the HTTP status: 529 instead of 429, which Anthropic keeps for a user's limits."""
    return 529 if refusal.status == 429 else refusal.status


def error_of(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """Return the object that Anthropic's clients expect, as a body and as an event of a stream."""
    status = status_of(refusal)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": bounded(_message(refusal))}
    if refusal.info is not None:
        own = {"code": refusal.info.code, "retryable": refusal.info.retryable}
        error["kvd"] = own | ({"detail": refusal.info.detail} if refusal.info.detail else {})
    return {"type": "error", "error": error, "request_id": request_id or None}


def encoded(refusal: Refusal, request_id: str) -> tuple[int, bytes]:
    """Return the status and the body."""
    error = error_of(refusal, request_id)
    return status_of(refusal), msgspec.json.encode(error, enc_hook=str)


def _message(refusal: Refusal) -> str:
    """Return the message; that of a long prompt begins as Anthropic's does.

    Clients compact their conversation if the message begins so.
    """
    detail = {} if refusal.info is None else refusal.info.detail
    tokens, limit = detail.get("prompt_tokens"), detail.get("context_length")
    if refusal.code != "context_length_exceeded" or tokens is None or limit is None:
        return refusal.message
    if tokens < limit:  # the prompt fits, and max_tokens does not
        return refusal.message
    return f"prompt is too long: {tokens} tokens > {limit} maximum; {refusal.message}"
