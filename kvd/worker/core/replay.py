"""Taking up requests whose worker died: completions are brought to where their clients saw them.

What was sent is known (`protocol.worker.ChoiceProgress`), so it is not drawn again: the engine feeds it as
the inputs of ordinary decode steps, in which the rows of others go on. The prompt is read on the
same cuts as before, and each step is given what it was given then, so keys, values and the draws
that follow are the same. Here the text is brought there too: its decoder, its stop strings, and
what of it the client has.

Does not cover: the steps (`mlx_engine`), and what a worker does about its own memory (`recovery`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidRequest
from protocol.worker import RowTokens

if TYPE_CHECKING:
    from kvd.worker.core.request import Completion, Request
    from kvd.worker.text.choices import Choices
    from protocol.messages import FinishReason
    from protocol.worker import ChoiceProgress, Report, Submit


def take_up(request: Request) -> list[Report]:
    """Bring a request's completions to where they were; those that are over leave it.

    Returns what the daemon has not heard of these.
    """
    reports: list[Report] = []
    completions = list(request.completions)
    for completion, resumed in zip(completions, request.submit.resume, strict=True):
        reports += _take_up(request, completion, resumed)
    return reports


def _take_up(request: Request, completion: Completion, resumed: ChoiceProgress) -> list[Report]:
    stream = completion.stream
    completion.tokens = list(resumed.tokens)
    completion.known = len(resumed.tokens)
    text = "".join([stream.push(token) for token in resumed.tokens])
    completion.said_bytes = resumed.text_bytes - len(text.encode())
    reason = resumed.reason or _reason(request, completion)
    if reason is None:
        return []
    request.completions.remove(completion)
    return ended(
        request.over,
        completion.key[1],
        resumed,
        reason,
        stopped=stream.stopped,
        rest="" if stream.stopped else completion.unsaid(stream.finish()),
    )


def _reason(request: Request, completion: Completion) -> FinishReason | None:
    """Return how a completion ended with its last token, if the daemon did not hear of it."""
    if completion.stream.stopped:
        return "stop"
    return "length" if len(completion.tokens) == request.max_new else None


def ended(
    over: Choices,
    choice: int,
    resumed: ChoiceProgress,
    reason: FinishReason,
    *,
    stopped: bool,
    rest: str,
) -> list[Report]:
    """Count a completion that is over; return what the daemon has not heard.

    ``stopped``: what was sent ends it; ``rest``: text that was not sent.
    """
    count = len(resumed.tokens)
    if resumed.reason is not None:
        # A token that ends a completion counts, and is not sent.
        return over.finish_reported(choice, reason, count + (reason == "stop" and not stopped))
    reports: list[Report] = []
    if rest:
        reports.append(RowTokens(rid=over.rid, index=count, tokens=[], text=rest, choice=choice))
    return reports + over.finish(choice, reason, count)


def unsaid(text: str, said_bytes: int) -> str:
    """Return a text without its first bytes in UTF-8, which the client has."""
    return text.encode()[said_bytes:].decode("utf-8", "ignore")


def check_resume(request: Submit, vocabulary: int) -> None:
    """Raise `InvalidRequest` where what is to be taken up cannot be of this request."""
    if request.resume and len(request.resume) != request.n:
        raise InvalidRequest(
            f"resume has {len(request.resume)} completions, not {request.n}", field="resume"
        )
    for one in request.resume:
        if any(not 0 <= token < vocabulary for token in one.tokens):
            raise InvalidRequest(
                f"resume holds a token outside the vocabulary of {vocabulary}", field="resume"
            )
