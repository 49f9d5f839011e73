"""The newest evictions from the prefix tree, so that a later miss can be explained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvd.worker.prefix.queued_paths import Path
from protocol.cache_outcome import Eviction, EvictionCause

MAX_EVICTIONS = 4096
"""Evictions kept: about 1 MB, and every checkpoint of 128 prompts of 32K tokens."""


class Evictions:
    """Digests of the paths whose checkpoints were dropped. ``clock``: seconds since 1970."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, EvictionCause]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, name: bytes, cause: EvictionCause) -> None:
        """Record that the checkpoint with this name was dropped now."""
        self._known.pop(name, None)
        self._known[name] = (self._clock(), cause)
        if len(self._known) > MAX_EVICTIONS:
            self._known.popitem(last=False)

    def remove(self, name: bytes) -> None:
        """Forget an eviction, because the checkpoint exists again."""
        self._known.pop(name, None)

    def find(self, path: Path, chunk: int, above: int) -> Eviction | None:
        """Return the eviction of the longest beginning of a path beyond ``above`` tokens."""
        for count in range(len(path), above // chunk, -1):
            if (known := self._known.get(path[count - 1])) is not None:
                return Eviction(count * chunk, *known)
        return None
