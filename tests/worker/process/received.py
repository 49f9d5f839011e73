"""The reports that a daemon received for a request, and the request that continues from there."""

from __future__ import annotations

import msgspec

from protocol.messages import FinishReason
from protocol.parts import PartStart
from protocol.resume import ChoiceProgress
from protocol.types import Usage, record_level
from protocol.worker import (
    ChoiceFinished,
    Report,
    RowFailed,
    RowFinished,
    RowPrompt,
    RowTokens,
    Submit,
)


class Received:
    """The contents of one request's reports so far."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tokens: list[list[int]] = [[] for _ in range(submit.n)]
        self.texts = [""] * submit.n
        self.parts: list[list[PartStart]] = [[] for _ in range(submit.n)]
        self.logprobs: list[list[object]] = [[] for _ in range(submit.n)]
        self.reasons: list[FinishReason | None] = [None] * submit.n
        self.prompt: list[object] = []
        self.levels: list[int] = []
        self.end: tuple[str, Usage] | None = None

    def add(self, report: Report) -> None:
        assert self.end is None, "a report after the end"
        match report:
            case RowTokens(choice=choice):
                assert self.reasons[choice] is None
                assert report.index == len(self.tokens[choice])
                self.tokens[choice] += report.tokens
                if report.tokens:
                    record_level(self.levels, report.level)
                self.texts[choice] += report.text
                self.parts[choice] += report.parts
                self.logprobs[choice] += report.logprobs or []
            case RowPrompt():
                assert report.index == len(self.prompt)
                self.prompt += report.logprobs
            case ChoiceFinished(choice=choice, reason=reason):
                assert self.reasons[choice] is None
                self.reasons[choice] = reason
            case RowFinished(reason=reason, usage=usage):
                self.end = (reason, msgspec.structs.replace(usage, cached_tokens=0))
            case RowFailed():
                raise AssertionError(report.error)

    def resubmission(self) -> Submit:
        """Return the request that a new worker gets after this one died."""
        resume = [
            ChoiceProgress(list(tokens), len(text.encode()), reason, len(parts))
            for tokens, text, reason, parts in zip(
                self.tokens, self.texts, self.reasons, self.parts, strict=True
            )
        ]
        return msgspec.structs.replace(
            self.submit,
            resume=resume,
            prompt_reported=len(self.prompt),
            levels_reported=self.levels,
        )

    def all(self) -> tuple[object, ...]:
        answer = (self.tokens, self.texts, self.parts, self.logprobs, self.reasons)
        return (*answer, self.prompt, self.end)
