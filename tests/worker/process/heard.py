"""What a daemon has heard of a request, word by word, and how it is taken up from there."""

from __future__ import annotations

import msgspec

from protocol.messages import FinishReason
from protocol.types import Usage
from protocol.worker import (
    ChoiceFinished,
    ChoiceProgress,
    Report,
    RowFailed,
    RowFinished,
    RowPrompt,
    RowTokens,
    Submit,
)


class Heard:
    """What a daemon has heard of one request."""

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tokens: list[list[int]] = [[] for _ in range(submit.n)]
        self.texts = [""] * submit.n
        self.told: list[list[object]] = [[] for _ in range(submit.n)]
        self.reasons: list[FinishReason | None] = [None] * submit.n
        self.prompt: list[object] = []
        self.end: tuple[str, Usage] | None = None

    def hear(self, report: Report) -> None:
        assert self.end is None, "a word after the end"
        match report:
            case RowTokens(choice=choice):
                assert self.reasons[choice] is None
                assert report.index == len(self.tokens[choice])
                self.tokens[choice] += report.tokens
                self.texts[choice] += report.text
                self.told[choice] += report.logprobs or []
            case RowPrompt():
                assert report.index == len(self.prompt)
                self.prompt += report.logprobs
            case ChoiceFinished(choice=choice, reason=reason):
                assert self.reasons[choice] is None
                self.reasons[choice] = reason
            case RowFinished(reason=reason, usage=usage):
                self.end = (reason, msgspec.structs.replace(usage, cached_tokens=0, levels=[]))
            case RowFailed():
                raise AssertionError(report.error)

    def again(self) -> Submit:
        resume = [
            ChoiceProgress(list(tokens), len(text.encode()), reason)
            for tokens, text, reason in zip(self.tokens, self.texts, self.reasons, strict=True)
        ]
        return msgspec.structs.replace(self.submit, resume=resume, prompt_reported=len(self.prompt))

    def all(self) -> tuple[object, ...]:
        return (self.tokens, self.texts, self.told, self.reasons, self.prompt, self.end)
