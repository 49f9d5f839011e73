"""Ends a request that the budget is too small for."""

from __future__ import annotations

from kvd.worker.core.batch import Batch
from kvd.worker.core.delivery import report_rest
from kvd.worker.core.request import Request
from protocol.errors import InsufficientMemory


def refuse(batch: Batch, request: Request, error: InsufficientMemory) -> None:
    """Fail a request that the budget is too small for, now or from its next token on.

    Without ``max_tokens``, what it has generated is all that fits: then it ends with ``length``. A
    token that is still in flight is dropped.
    """
    if request.submit.max_tokens is not None or not request.generated:
        batch.fail(request, error)
        return
    for completion in request.live:
        batch.reports += report_rest(request, completion, ended=False)
    batch.finish(request.rid, "length")
