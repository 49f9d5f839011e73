"""The choices of one request: which still run, and the reports when they end."""

from __future__ import annotations

from protocol.errors import DeadlineExceeded, InvalidRequest
from protocol.finish_reason import combined_reason
from protocol.messages import FinishReason
from protocol.types import Usage, record_level
from protocol.worker import ChoiceFinished, Report, RowFinished, Submit


class Choices:
    """The n choices of a request: call `finish` once for each."""

    def __init__(self, request: Submit, prompt_tokens: int) -> None:
        self.rid = request.rid
        self._several = request.n > 1
        self._prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        """Prompt tokens that were found in the prefix cache."""
        self.reasoning_tokens = 0
        """Tokens of reasoning in all choices, with its markers."""
        self.stop_text = ""
        """Stop string that ended the choice that ended last."""
        self.embedding: bytes | None = None
        """See `protocol.worker.RowFinished`."""
        self._completion_tokens = 0
        self._levels = list(request.levels_reported)
        self._reasons: set[FinishReason] = set()
        self._running = set(range(request.n))

    @property
    def level(self) -> int:
        """Precision level of the newest token."""
        return self._levels[-1] if self._levels else 0

    def record_level(self, level: int, prompt_level: int | None = None) -> None:
        """Record the precision level at which a token was generated, for the usage.

        ``prompt_level``: that of the prompt, if another one; it counts before the first token.
        """
        if prompt_level is not None and not self._levels:
            record_level(self._levels, prompt_level)
        record_level(self._levels, level)

    def finish(self, choice: int, reason: FinishReason, tokens: int) -> list[Report]:
        """End a choice with this many tokens; return the reports."""
        end = self.finish_reported(choice, reason, tokens)
        if not self._several:
            return [*end]
        usage = end[0].usage if end else None
        return [ChoiceFinished(rid=self.rid, choice=choice, reason=reason, usage=usage), *end]

    def finish_reported(self, choice: int, reason: FinishReason, tokens: int) -> list[RowFinished]:
        """End a choice whose own end was already reported; return the remaining reports."""
        self._running.remove(choice)
        self._reasons.add(reason)
        self._completion_tokens += tokens
        if self._running:
            return []
        usage = Usage(
            self._prompt_tokens,
            self._completion_tokens,
            self.cached_tokens,
            self._levels,
            self.reasoning_tokens,
        )
        return [
            RowFinished(
                rid=self.rid,
                reason=combined_reason(self._reasons),
                usage=usage,
                stop_text="" if self._several else self.stop_text,
                embedding=self.embedding,
            )
        ]


def check_token_ids(request: Submit, vocabulary: int) -> None:
    """Raise `InvalidRequest` for token ids outside the vocabulary."""
    named = {"stop_tokens": request.stop_tokens, "sampling.logit_bias": request.sampling.logit_bias}
    for field, tokens in named.items():
        for token in tokens:
            if token >= vocabulary:
                raise InvalidRequest(
                    f"{field} names token {token}, outside the vocabulary of {vocabulary}",
                    field=field,
                )


def deadline_exceeded(tokens: int) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the deadline passed after {tokens} tokens; set a later deadline or request fewer tokens",
        completion_tokens=tokens,
    )
