"""Messages about explanations, a part of `protocol.messages`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from protocol import fields
from protocol.cache_outcome import RequestOutcome
from protocol.fields import PositiveCount
from protocol.forecast import Forecast
from protocol.kv import KVSpec
from protocol.message_base import EventBase, RequestBase, RequestId

MAX_FORECAST_ROWS = 65_536


class Explain(RequestBase, tag="explain", frozen=True, kw_only=True):
    """Return how much memory rows of a model would need, and how it would be freed."""

    model: fields.Name
    """Name of a loaded or known model, or the source of any other model."""
    rows: Annotated[int, Meta(ge=0, le=MAX_FORECAST_ROWS)] = 1
    """Number of requests. At most ``max_rows`` of them run at once: more count as ``max_rows``."""
    context: PositiveCount | None = None
    """Tokens of each row, prompt and completion together. Absent, or more than the model's context:
    the whole context."""
    kv: KVSpec | None = None
    """KV settings for a model that is neither loaded nor known; absent: defaults of ``load``."""
    ranks: fields.Ranks | None = None
    """Processes that would share the model; absent: that of the known model, otherwise 1."""
    device: fields.Device | None = None
    """GPU of the model, or of its first rank; absent: that of the known model, otherwise 0."""


class ExplainRequest(RequestBase, tag="explain_request", frozen=True, kw_only=True):
    """Return what the prefix cache did for the prompts of recent requests, and why."""

    request: RequestId | None = None
    """Id of the request: its own ``id``, the daemon's name for it, or the header ``x-request-id``
    of its HTTP answer; absent: the newest requests."""


class Explained(EventBase, tag="explain", frozen=True, kw_only=True):
    """Answers ``explain``."""

    forecast: Forecast


class ExplainedRequests(EventBase, tag="explain_request", frozen=True, kw_only=True):
    """Answers ``explain_request``."""

    requests: list[RequestOutcome]
    """The newest first. Several requests may have the same ``id``; empty: none is known."""
