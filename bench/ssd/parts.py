"""What the engine's thread does while a prefix is read: pools that grow, and records copied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.pool_growth import GrowthBehindSteps


@dataclass
class Parts:
    """Seconds of the parts of one read."""

    grow_s: float = 0.0
    """Growth of pools, piece by piece."""
    first_copies_s: float = 0.0
    """The first copy into each layer. With CUDA it may move the layer's pool."""
    other_copies: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    """Waits for the end of copies that a device makes."""

    def as_dict(self) -> dict[str, Any]:
        """Return the parts for the JSON file."""
        others = sorted(self.other_copies)
        return {
            "grow_s": self.grow_s,
            "first_copies_s": self.first_copies_s,
            "other_copies": len(others),
            "other_copies_s": sum(others),
            "wait_s": self.wait_s,
            "median_copy_s": others[len(others) // 2] if others else None,
        }


@contextmanager
def measured() -> Iterator[Parts]:
    """Measure the reads within the context."""
    parts, seen = Parts(), set[int]()
    make_room_for, write_record = GrowthBehindSteps.make_room_for, LayerStore.write_record

    def grow(growth: GrowthBehindSteps, *arguments: Any) -> Iterator[float]:
        pieces = make_room_for(growth, *arguments)
        while True:
            seconds, found = _timed(lambda: next(pieces, None))
            parts.grow_s += seconds
            if found is None:
                return
            yield found

    def write(layer: LayerStore, level: int, slots: Sequence[int | None], record: Any) -> Any:
        seconds, wait = _timed(lambda: write_record(layer, level, slots, record))
        if id(layer) in seen:
            parts.other_copies.append(seconds)
        else:
            seen.add(id(layer))
            parts.first_copies_s += seconds
        return None if wait is None else partial(waited, wait)

    def waited(wait: Callable[[], None]) -> None:
        parts.wait_s += _timed(wait)[0]

    GrowthBehindSteps.make_room_for = grow  # type: ignore[method-assign]
    LayerStore.write_record = write  # type: ignore[method-assign]
    try:
        yield parts
    finally:
        GrowthBehindSteps.make_room_for = make_room_for  # type: ignore[method-assign]
        LayerStore.write_record = write_record  # type: ignore[method-assign]


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found
