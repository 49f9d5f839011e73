"""The completions of one request on their way out: which still run, and what is said at an end.

Shared by the real engine and the fake one. Knows nothing of rows, text or memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import DeadlineExceeded, InvalidRequest
from protocol.types import Usage
from protocol.worker import ChoiceFinished, RowFinished

if TYPE_CHECKING:
    from protocol.messages import FinishReason
    from protocol.worker import Report, Submit

_GRAVEST: tuple[FinishReason, ...] = ("cancelled", "length", "stop")
"""What a request with several completions is said to have ended with: the first of these."""


class Choices:
    """The n completions of a request with so many prompt tokens: `finish` each of them once."""

    def __init__(self, request: Submit, prompt_tokens: int) -> None:
        self.rid = request.rid
        self._several = request.n > 1
        self._prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        """Of the prompt, those that were in the cache already."""
        self._completion_tokens = 0
        self._levels: list[int] = []
        self._reasons: set[FinishReason] = set()
        self._open = list(range(request.n))

    @property
    def open(self) -> tuple[int, ...]:
        """Those that still run."""
        return tuple(self._open)

    def runs_on(self, level: int) -> None:
        """Note the level of the ladder that it is on from now on."""
        if self._levels[-1:] != [level]:
            self._levels.append(level)

    def finish(self, choice: int, reason: FinishReason, tokens: int) -> list[Report]:
        """End one that made so many tokens; return what to report."""
        end = self.told(choice, reason, tokens)
        if self._several:
            return [ChoiceFinished(rid=self.rid, choice=choice, reason=reason), *end]
        return end

    def told(self, choice: int, reason: FinishReason, tokens: int) -> list[Report]:
        """Do the same for one whose end was reported before; return what is left to report."""
        self._open.remove(choice)
        self._reasons.add(reason)
        self._completion_tokens += tokens
        if self._open:
            return []
        gravest = next(reason for reason in _GRAVEST if reason in self._reasons)
        usage = Usage(
            self._prompt_tokens, self._completion_tokens, self.cached_tokens, self._levels
        )
        return [RowFinished(rid=self.rid, reason=gravest, usage=usage)]


def check_ids(request: Submit, vocabulary: int) -> None:
    """Raise `InvalidRequest` for token ids that the model does not have."""
    named = (
        ("stop_tokens", request.stop_tokens),
        ("sampling.logit_bias", request.sampling.logit_bias),
    )
    for field, tokens in named:
        for token in tokens:
            if token >= vocabulary:
                raise InvalidRequest(
                    f"{field} names token {token}, outside the vocabulary of {vocabulary}",
                    field=field,
                )


def late(tokens: int) -> DeadlineExceeded:
    """Return the error of a request whose deadline has passed when it had made so many tokens."""
    return DeadlineExceeded(
        f"its deadline passed after {tokens} tokens; give it more time, or ask for less",
        completion_tokens=tokens,
    )
