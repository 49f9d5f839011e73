"""Trace a runner's compiled steps again, after a benchmark replaced some of the model's code."""

from __future__ import annotations

from kvd.worker.serving.compiled import CompiledDecode
from kvd.worker.serving.runner import Runner


def retrace(runner: Runner) -> None:
    """Drop the traces of compiled decode steps."""
    if runner.compiled:
        runner._compiled = CompiledDecode(runner.model, runner.cache)  # noqa: SLF001
