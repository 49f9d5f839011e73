"""What a model can do in a conversation, from its template and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvd.worker.answer.find import find_forms
from kvd.worker.answer.forms import QWEN, AnswerForms
from kvd.worker.answer.written import can_write
from kvd.worker.text.failures import is_failure
from kvd.worker.text.fast_tokenizer import FastWrapper
from kvd.worker.text.template import ChatTemplate
from protocol.types import ChatAbilities


def forms_of(wrapper: Any, template: ChatTemplate, vocabulary: Mapping[str, int]) -> AnswerForms:
    """Return the forms of a model's answers; none without a chat template.

    If the template lists no tools, or shows calls in an unknown form, the model is asked in the
    system message to write calls in the form that is found, or in Qwen's.

    ``wrapper``: as for `kvd.worker.text.text.Text`.
    """
    if not template.exists:
        template.use_form(None)
        return AnswerForms()
    tokenizer = wrapper._tokenizer  # noqa: SLF001 - as in `Text`

    def token_of(text: str) -> int | None:
        if text not in vocabulary:
            return None
        try:
            found = list(tokenizer.encode(text, add_special_tokens=False))
        except BaseException as error:  # tokenizers raise any type
            if not is_failure(error):
                raise
            return None
        return int(found[0]) if found == [vocabulary[text]] else None

    found = find_forms(
        token_of,
        source=template.source,
        asked=template.asked,
        rendered_call=template.rendered_call,
        parser=parser_name(wrapper),
    )
    if found.harmony is None and template.usable and not (found.call and template.lists_tools):
        known = found.call is not None and can_write(found.call)
        form = found.call if known and found.call else QWEN
        template.note_tools(form, known=known)
        return replace(found, call=form).with_tokens(token_of)
    template.use_form(found.call)
    return found


def parser_name(wrapper: Any) -> str:
    """Return the name of mlx-lm's parser of the model's tool calls; empty: it has none."""
    if isinstance(wrapper, FastWrapper):
        return wrapper.tool_parser_name
    return str(getattr(wrapper.tool_parser, "__module__", "")).rpartition(".")[2]


def abilities_of(template: ChatTemplate, forms: AnswerForms) -> ChatAbilities:
    reasoning = ""
    if forms.harmony is not None:
        reasoning = f"{forms.harmony.channel.text}{forms.harmony.reasoning}"
    elif forms.reasoning is not None:
        reasoning = forms.reasoning.begin.text
    return ChatAbilities(
        tools=forms.calls if template.lists_tools or template.notes_tools else "",
        tools_noted=template.notes_tools,
        tool_results=template.messages.shows_results,
        reasoning=reasoning,
        reasoning_switch=template.switch is not None,
        reasons_by_default=template.reasons_by_default,
        efforts=template.efforts,
        late_system=template.late_system,
    )
