"""Continues requests whose worker died, from the tokens and text that their clients have.

The tokens that were sent (`protocol.resume.ChoiceProgress`) are not drawn again: they are inputs of
ordinary decode steps, after the same prefill chunks. So keys, values and all further draws are the
same. This module covers the text and the reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import InvalidRequest
from protocol.worker import RowTokens

if TYPE_CHECKING:
    from kvd.worker.text.choices import Choices
    from protocol.messages import FinishReason
    from protocol.parts import PartStart
    from protocol.resume import ChoiceProgress
    from protocol.worker import Report, Submit


class SentText:
    """What the client has of a completion's coming text.

    ``nbytes``: the first bytes in UTF-8. ``parts``: the first parts that begin in it.
    """

    def __init__(self, nbytes: int = 0, parts: int = 0) -> None:
        self._nbytes = nbytes
        self._parts = max(0, parts)

    def remove_from(self, text: str) -> str:
        """Return the part of the next text that the client does not have."""
        if not self._nbytes:
            return text
        content = text.encode()
        new = content[self._nbytes :].decode("utf-8", "ignore")
        self._nbytes = max(0, self._nbytes - len(content))
        return new

    def remove_parts(self, parts: list[PartStart]) -> list[PartStart]:
        """Return the parts whose beginning the client does not have."""
        if not self._parts:
            return parts
        sent = min(self._parts, len(parts))
        self._parts -= sent
        return parts[sent:]


def finish_replayed(
    choices: Choices,
    choice: int,
    resumed: ChoiceProgress,
    reason: FinishReason,
    *,
    stopped: bool,
    rest: str,
    parts: list[PartStart] | None = None,
) -> list[Report]:
    """Count a completion that has ended; return the reports that the daemon lacks.

    ``stopped``: whether the tokens that were sent contain its end. ``rest``: text that was not
    sent. ``parts``: the parts that begin in it.
    """
    count = len(resumed.tokens)
    if resumed.reason is not None:
        # A token that ends a completion is counted but not sent.
        count += reason == "stop" and not stopped
        return [*choices.finish_reported(choice, reason, count)]
    reports: list[Report] = []
    if rest or parts:
        reports.append(
            RowTokens(
                rid=choices.rid, index=count, tokens=[], text=rest, choice=choice, parts=parts or []
            )
        )
    return reports + choices.finish(choice, reason, count)


def check_resume(request: Submit, vocabulary: int) -> None:
    """Raise `InvalidRequest` if ``resume`` does not match the request or the model."""
    if request.resume and len(request.resume) != request.n:
        raise InvalidRequest(
            f"resume has {len(request.resume)} completions, not {request.n}", field="resume"
        )
    for resumed in request.resume:
        if any(not 0 <= token < vocabulary for token in resumed.tokens):
            raise InvalidRequest(
                f"resume holds a token outside the vocabulary of {vocabulary}", field="resume"
            )
