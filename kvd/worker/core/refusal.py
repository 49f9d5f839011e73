"""Ends a request that the budget is too small for."""

from __future__ import annotations

from kvd.worker.core.batch import Batch
from kvd.worker.core.request import Request
from protocol.errors import InsufficientMemory
from protocol.worker import RowTokens


def refuse(batch: Batch, request: Request, error: InsufficientMemory) -> None:
    """Fail a request that the budget is too small for, now or from its next token on.

    Without ``max_tokens``, what it has generated is all that fits: then it ends with ``length``. A
    token that is still in flight is dropped.
    """
    if request.submit.max_tokens is not None or not request.generated:
        batch.fail(request, error)
        return
    for completion in request.live:
        rest = completion.sent_text.remove_from(completion.stream.finish())
        if rest:
            rid, choice = completion.key
            index = len(completion.tokens)
            batch.reports.append(
                RowTokens(rid=rid, index=index, tokens=[], text=rest, choice=choice)
            )
    batch.finish(request.rid, "length")
