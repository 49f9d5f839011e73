"""One request's place in a model's cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.worker.cache.rows import Row


@dataclass(eq=False)
class SequenceRow:
    """One request's rows, in all stores."""

    rows: list[Row]
    length: int = 0
    alive: bool = True
