"""Runs a target: for a number of inputs in a test, or for minutes by hand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.target import CORPUS, Target

_ROUND = 100
"""Inputs of one round by hand. Each round draws with a new seed."""
_NO_CHECKS = list(HealthCheck)


@dataclass
class Failure(Exception):
    """An input for which the check failed; hypothesis has made it as small as it can."""

    data: bytes
    cause: BaseException

    def save(self, target: Target) -> Path:
        name = f"found-{hashlib.sha256(self.data).hexdigest()[:12]}"
        file = CORPUS / target.name / name
        file.write_bytes(self.data)
        return file


def run(target: Target, check: Callable[[bytes], None], examples: int, number: int) -> int:
    """Try inputs, drawn from the seed ``number``; return how many. Raises `Failure`."""
    tried = 0
    failed: list[bytes] = []

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=_NO_CHECKS,
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(target.inputs())
    def try_one(data: bytes) -> None:
        nonlocal tried
        tried += 1
        try:
            check(data)
        except Exception:
            failed[:] = [data]
            raise

    try:
        try_one()
    except Exception as error:
        if not failed:
            raise  # a fault of the strategy
        raise Failure(failed[0], error) from error
    return tried


def run_for(target: Target, seconds: float, number: int) -> int:
    """Try the corpus, then inputs until the time is over; return how many."""
    end, tried = time.monotonic() + seconds, 0
    with target.checking() as check:
        for data in target.seeds():
            check(data)
            tried += 1
        while time.monotonic() < end:
            tried += run(target, check, _ROUND, number)
            number += 1
    return tried
