"""What the daemon knows of one request: while it is open, and after its end."""

from __future__ import annotations

from typing import Literal

import msgspec

RequestStage = Literal["waiting", "running", "paused", "stop", "length", "cancelled", "error"]
"""Where an open request is, or how the request ended."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Unknown values are absent."""

    rid: str
    """The daemon's id of the request, which events and the log use."""
    model: str
    stage: RequestStage
    seq: int = 0
    """Number of an ended request among all ended ones, from 1; 0 while it is open."""
    at: float = 0.0
    """Time of the end, in seconds since 1970; 0 while the request is open."""
    code: str = ""
    """Code of the error that ended the request."""
    message: str = ""
    """Message of that error."""
    prompt_tokens: int | None = None
    """Absent until a worker has tokenized the prompt."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache; absent until a worker has looked
    it up."""
    cache: str = ""
    """Why tokens of the prompt were computed; empty until a worker has looked it up."""
    completion_tokens: int = 0
    age_s: float | None = None
    """Seconds from the arrival until now, or until the end; absent if an earlier daemon accepted
    the request."""
    first_token_s: float | None = None
    """Seconds from the arrival until the first token was sent."""
    levels: list[int] = []
    """Precision levels at which the tokens were generated, in order."""
