"""What the server attaches to a request for its handlers."""

from __future__ import annotations

from aiohttp import web

REQUEST_ID = web.RequestKey("request_id", str)
"""Id of the request in its answer's headers and in the log."""
OWNER = web.RequestKey("owner", str)
"""Name of the request's API key; absent if none is required."""
