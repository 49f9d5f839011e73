"""Errors during a load, as errors for the user."""

from __future__ import annotations

import logging

from kvd.worker.process import shortage
from kvd.worker.process.memory_limit import limit
from kvd.worker.text.failures import is_failure, one_line
from protocol.errors import InsufficientMemory, InvalidModel, KvdError

_log = logging.getLogger("kvd.worker")


def typed(error: BaseException, source: str) -> KvdError | None:
    """Return the typed error for one that a load raised; None if it needs no other type.

    Loading uses values of the model's files in many places, and a value of the wrong type or size
    may fail in any of them. A new process would fail in the same way. Errors of the device and of
    the operating system are not converted, because they may not recur.
    """
    if isinstance(error, KvdError):
        return None
    short = shortage.shortage_of(error)
    if short is not None and limit.refuses_allocations:
        return InvalidModel(
            f"loading {source} takes more memory than its files need: an allocation was refused at"
            f" the worker's limit of {limit.nbytes >> 20} MiB; check config.json and the tokenizer",
            source=source,
        )
    if short is not None:
        return InsufficientMemory(
            f"the device ran out of memory while the model was loaded ({short.reason}):"
            " stop other programs that use the device, or lower the budget to its free memory"
        )
    recurs = isinstance(error, RecursionError) or not isinstance(error, (RuntimeError, OSError))
    if not (is_failure(error) and recurs):
        return None
    _log.error("the load failed", exc_info=error)
    return InvalidModel(
        f"{source} cannot be loaded: {one_line(error)}; the worker's log has the traceback",
        source=source,
    )
