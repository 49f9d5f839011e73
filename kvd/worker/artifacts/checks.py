"""Results of the checks at load, kept for later loads of the same model on the same machine.

A load runs the model many times to find the fastest way to serve it that is right. The result
depends on the model, the settings, the device and the software. If all of these are the same
(`kvd.worker.serving.check_key`), it is not computed again. Only checks that passed are kept: a
check that failed, or kernels that were slower, may have had another cause, such as a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec

from kvd.worker.artifacts.entries import Entries

MOST_BYTES = 4 * 1024 * 1024
"""Limit of the stored results; those of a model take about 1 KB."""

_Found = TypeVar("_Found")


@dataclass
class _Results:
    """Encoded results by check."""

    known: dict[str, bytes] = field(default_factory=dict)
    changed: bool = False


class Checks:
    """The checks of one load. ``key``: a digest of everything that results depend on.

    Without a store, every check runs.
    """

    times_plain: ClassVar[bool] = True
    """Whether kernels are timed against plain operations."""

    def __init__(self, stored: Entries | None = None, key: str = "") -> None:
        self._stored = stored
        self._key = key
        self._prefix = ""
        self._results = _Results()
        content = None if stored is None else stored.get(key)
        if content is not None:
            try:
                self._results.known = msgspec.msgpack.decode(content, type=dict[str, bytes])
            except msgspec.MsgspecError:
                self._results.changed = True  # written by other code

    def under(self, name: str) -> Checks:
        """Return checks whose names begin with ``name``: those of one way to serve the model."""
        found = Checks()
        found._stored, found._key, found._results = self._stored, self._key, self._results
        found._prefix = f"{self._prefix}{name}: "
        return found

    def result(
        self,
        check: str,
        run: Callable[[], _Found],
        kind: Any,
        *,
        passed: Callable[[_Found], bool] = lambda _found: True,
    ) -> _Found:
        """Return a check's kept result, or run it. Raises what ``run`` raises, which is not kept.

        ``kind``: the result's type. ``passed``: whether a result may be kept.
        """
        name = self._prefix + check
        if (data := self._results.known.get(name)) is not None:
            try:
                known: _Found = msgspec.json.decode(data, type=kind)
            except msgspec.MsgspecError:
                del self._results.known[name]
            else:
                return known
        found = run()
        if passed(found):
            self._results.known[name] = msgspec.json.encode(found)
            self._results.changed = True
        return found

    def agrees(self, check: str, run: Callable[[], bool]) -> bool:
        """Return whether a check passed before, or passes now."""
        return self.result(check, run, bool, passed=bool)

    def alone(self) -> AbstractContextManager[None]:
        """Let the model's passes need no other process, also if this process shares the model."""
        return nullcontext()

    def keep(self) -> None:
        """Store new results. Call it when the load has succeeded."""
        if self._stored is not None and self._results.changed:
            self._stored.put(self._key, msgspec.msgpack.encode(self._results.known))
            self._results.changed = False
