"""What a step does, as the scheduler decided it: a value."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.worker.scheduling.row import Chunk


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step does."""

    admitted: tuple[str, ...]
    """Rows that left the queue just now, in order; they also appear below."""
    group: tuple[Chunk, ...]
    """What one forward pass prefills: one chunk, or the last chunks of several rows."""
    decode: tuple[str, ...]
    """Each stands for all choices of its request that have not ended."""
    wanted_pages: int
    """Pages that the head of the queue lacks; 0 if there is no head or only a place is missing."""
    hoped_pages: int = 0
    """Pages lacking for all requests of the queue that a place is free for."""
    restored: tuple[str, ...] = ()
    """Those of ``admitted`` that were parked: they go on from where they were."""

    @property
    def prefill(self) -> Chunk | None:
        """The one chunk, for an engine that does not group."""
        return self.group[0] if self.group else None
