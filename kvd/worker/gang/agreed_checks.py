"""The checks of a load, with results that all ranks of a gang agree on.

The checks run the model, and so collectives: if one rank skipped a check, or chose another way to
serve the model, the others would wait for it without end. Results are therefore never kept, and
one rank's failure counts for all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import msgspec

from kvd.worker.artifacts.checks import Checks
from kvd.worker.gang import sums
from kvd.worker.gang.control import Peers
from kvd.worker.serving.selfcheck import SelfCheckFailed

_Found = TypeVar("_Found")


class AgreedChecks(Checks):
    """Checks that run on all ranks at the same time."""

    times_plain: ClassVar[bool] = False  # each rank would decide by its own clock

    def __init__(self, peers: Peers, prefix: str = "") -> None:
        super().__init__()
        self._peers = peers
        self._prefix = prefix

    def under(self, name: str) -> AgreedChecks:
        return AgreedChecks(self._peers, f"{self._prefix}{name}: ")

    def result(
        self,
        check: str,
        run: Callable[[], _Found],
        kind: Any,
        *,
        passed: Callable[[_Found], bool] = lambda _found: True,
    ) -> _Found:
        """Run the check on all ranks; return one result for all of them.

        This is the first one that has not passed, otherwise the largest number, and for other
        types the leader's. Raises `SelfCheckFailed` on all ranks if one rank raises it.
        """
        failure, data, ok = "", b"", True
        try:
            found = run()
            data, ok = msgspec.json.encode(found), passed(found)
        except SelfCheckFailed as error:
            failure = str(error) or "the self-check failed"
        results = self._peers.exchange(self._prefix + check, (failure, ok, data))
        for why, _, _ in results:
            if why:
                raise SelfCheckFailed(why)
        values: list[_Found] = [msgspec.json.decode(one, type=kind) for _, _, one in results]
        for value, (_, has_passed, _) in zip(values, results, strict=True):
            if not has_passed:
                return value
        return max(values) if kind in (int, float) else values[0]  # type: ignore[type-var]

    def alone(self) -> AbstractContextManager[None]:
        """Let passes compute with this rank's part of the model only, within the context.

        A check may then end early on one rank, and the others do not wait in a collective.
        """
        return sums.own_terms()

    def keep(self) -> None:
        """Do nothing: a rank that used a kept result would skip collectives."""
