"""What the server attaches to a request for its handlers."""

from __future__ import annotations

from aiohttp import web

OWNER = web.RequestKey("owner", str)
"""Name of the request's API key; absent if none is required."""
