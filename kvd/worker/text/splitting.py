"""Which parts the answers of a model have, for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvd.worker.answer.forms import AnswerForms, opened_by_prompt
from kvd.worker.answer.harmony import HarmonyAnswer
from kvd.worker.answer.marked import CallOptions, MarkedAnswer
from kvd.worker.answer.parts import AnswerReader
from kvd.worker.text.detokenizer import special_ids
from kvd.worker.text.stream import AnswerSplit
from protocol.worker import Submit

_PROMPT_END = 64
"""Tokens at the end of a prompt that may begin the answer's first part."""


class Splitting:
    """The forms of one model, applied to requests."""

    def __init__(self, tokenizer: Any, forms: AnswerForms) -> None:
        """``tokenizer``: a `FastTokenizer`, or a tokenizer of transformers."""
        self.forms = forms
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = special_ids(tokenizer)
        self._special = {token: one.content for token, one in added.items() if token in special}
        self._end_reasoning: list[int] = (
            list(tokenizer.encode(forms.end_of_reasoning, add_special_tokens=False))
            if forms.has_reasoning
            else []
        )

    @property
    def special(self) -> dict[str, int]:
        """Special tokens, and markers that are tokens of their own, by their texts."""
        markers = {one.text: one.token for one in self.forms.markers if one.token is not None}
        return {text: token for token, text in self._special.items()} | markers

    def end_of(self, prompt: Sequence[int]) -> str:
        """Return the text at the end of a prompt, which may begin the answer's first part."""
        return str(self._tokenizer.decode(list(prompt[-_PROMPT_END:]), skip_special_tokens=False))

    def closing(self, prompt: str) -> str:
        """Return what ends the reasoning that this prompt begins; empty if it begins none."""
        form = self.forms.reasoning
        opened = form is not None and opened_by_prompt(form, prompt)
        return f"{self.forms.end_of_reasoning}\n\n" if opened else ""

    def of(
        self, request: Submit, prompt: Sequence[int], choice: int, *, streams: bool
    ) -> AnswerSplit | None:
        """Return how a choice is split; None: it is one text.

        ``streams``: whether the arguments of calls are passed on as they arrive.
        """
        forms, chat = self.forms, request.chat
        tools = () if chat.tool_choice == "none" else tuple(chat.tools)
        if not forms.has_reasoning and not (tools and forms.has_calls):
            return None
        markers = [one for one in forms.markers if tools or one not in forms.call_markers]
        options = CallOptions(tools, streams)
        end = self.end_of(prompt)
        if forms.harmony is not None:
            opening = end.rpartition(forms.harmony.start.text)[2]
            reader: AnswerReader = HarmonyAnswer(forms.harmony, options, opening)
        else:
            reader = MarkedAnswer(
                forms,
                options,
                in_reasoning=forms.reasoning is not None and opened_by_prompt(forms.reasoning, end),
                holds_space=bool(tools) and not request.stop,
            )
        return AnswerSplit(
            reader,
            request.rid,
            choice,
            self._special | {one.token: one.text for one in markers if one.token is not None},
            chat.max_reasoning_tokens,
            self._end_reasoning,
        )
