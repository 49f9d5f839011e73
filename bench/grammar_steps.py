"""Where the steps of an engine's rows spend their time when grammars bind them."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvd.worker.core.decode_step import DecodeStep
from kvd.worker.core.masks import StepMasks


class StepWatch:
    """Counts what an engine's `StepMasks` does in its steps, from `start` on."""

    def __init__(self, masks: StepMasks) -> None:
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        # On the instance: the engine and the object itself find the watched method first.
        watched: Any = masks
        watched.evaluate = self._timed("launch and tokens", masks.evaluate, self._launched)
        watched.advance = self._timed("tokens", masks.advance)
        watched._wait = self._timed("wait for masks", masks._wait)  # noqa: SLF001
        watched.draw = self._timed("draw", masks.draw, self._drawn)

    def start(self) -> None:
        self._seconds.clear()
        self._counts.clear()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def report(self) -> dict[str, float]:
        """Return means of one step: milliseconds, rows, page faults and waits for a processor."""
        steps = max(1, self._counts["launches"])
        usage, before = resource.getrusage(resource.RUSAGE_SELF), self._usage
        found = {f"{name}_ms": 1e3 * value / steps for name, value in self._seconds.items()}
        return {
            "steps": self._counts["launches"],
            **{name.replace(" ", "_"): round(value, 3) for name, value in found.items()},
            "rows": round(self._counts["rows"] / steps, 2),
            "late_rows": round(self._counts["late"] / steps, 3),
            "page_faults": round((usage.ru_minflt - before.ru_minflt) / steps, 1),
            "sleeps": round((usage.ru_nvcsw - before.ru_nvcsw) / steps, 1),
        }

    def _timed(
        self, name: str, plain: Callable[..., Any], note: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        def called(*given: Any, **more: Any) -> Any:
            start = time.perf_counter()
            found = plain(*given, **more)
            self._seconds[name] += time.perf_counter() - start
            if note is not None:
                note(*given)
            return found

        return called

    def _launched(self, _previous: DecodeStep | None, step: DecodeStep, _others: list[Any]) -> None:
        self._counts["launches"] += 1
        self._counts["rows"] += len(step.drawing) + len(step.passing)

    def _drawn(self, step: DecodeStep, *_: Any) -> None:
        self._counts["late"] += len(step.late)
