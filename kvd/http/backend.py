"""The daemon as the HTTP server sees it. `actors.system.System` implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from protocol.embedding import Embed
from protocol.messages import Event, Generate, Tokenize, Tokenized
from protocol.types import DaemonStatus


class Call(Protocol):
    """A running completion."""

    def cancel(self) -> None:
        """Cancel the completion within a step; no further events are delivered. Idempotent."""


class Completions(Protocol):
    """Runs requests for completions."""

    def generate(self, request: Generate, deliver: Callable[[Event], None]) -> Call:
        """Run a request, as `Backend.generate` does."""


class Backend(Protocol):
    """The daemon behind the routes."""

    def generate(self, request: Generate | Embed, deliver: Callable[[Event], None]) -> Call:
        """Run a request and pass its events to ``deliver`` on the event loop.

        The last event is always delivered, unless the call is cancelled.
        """

    async def tokenize(self, request: Tokenize) -> Tokenized:
        """Tokenize a text; loads the model if it must. Raises the request's `KvdError`."""

    def keep_loaded(self, model: str, seconds: float) -> None:
        """Set how long a loaded model stays loaded without requests; negative: no limit."""

    def status(self) -> DaemonStatus:
        """Return the newest snapshots without waiting."""


Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Maps an ``Accept`` header to the exposition for Prometheus and its content type."""

Ignored = Callable[[str, str, int], None]
"""Called with the route's path, what a request has that kvd ignores (`IGNORED`), and how many."""
IGNORED = ("field", "item", "reasoning", "tool")

Answered = Callable[[str, int], None]
"""Called after each answer with the route's path (empty if there is no route) and the status."""
