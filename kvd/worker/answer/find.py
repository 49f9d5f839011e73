"""Finds the forms of a model's answers from its chat template and vocabulary, at load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvd.worker.answer import forms
from kvd.worker.answer.forms import AnswerForms, CallForm, ReasoningForm
from kvd.worker.answer.marked import CallOptions, MarkedAnswer
from kvd.worker.answer.parts import Begin
from protocol.tools import Tool

PROBE_TOOL = Tool(
    name="probe_tool",
    description="Probe.",
    parameters={"type": "object", "properties": {"probe_key": {"type": "string"}}},
)
PROBE_ARGUMENTS = {"probe_key": "probe value"}
_PARSERS: Mapping[str, CallForm] = {
    "json_tools": forms.QWEN,
    "qwen3_coder": forms.QWEN_CODER,
    "glm47": forms.GLM,
    "laguna": forms.GLM,
    "longcat": forms.LONGCAT,
    "minimax_m2": forms.MINIMAX,
    "muse_spark": forms.MUSE,
    "mistral": forms.MISTRAL,
    "kimi_k2": forms.KIMI,
    "kimi_k3": forms.KIMI_K3,
    "pythonic": forms.PYTHONIC,
    "gemma4": forms.GEMMA,
    "function_gemma": forms.FUNCTION_GEMMA,
    "minicpm5": forms.MINICPM,
}
"""Forms by the module of mlx-lm's parser, for templates that do not show calls."""


def find_forms(
    token_of: Callable[[str], int | None], *, source: str, rendered_call: str, parser: str
) -> AnswerForms:
    """Return a model's forms.

    ``token_of``: id of a text that is one token. ``source``: the template. ``rendered_call``: a
    conversation whose answer calls `PROBE_TOOL`, rendered; it may be empty. ``parser``: name of the
    parser that mlx-lm chose; it may be empty.
    """
    harmony = forms.HARMONY
    markers = (harmony.start, harmony.channel, harmony.message, harmony.end, harmony.call)
    if all(token_of(marker.text) is not None for marker in markers):
        return AnswerForms(harmony=harmony).with_tokens(token_of)
    call = _shown_call(rendered_call) or _PARSERS.get(parser)
    return AnswerForms(_reasoning(token_of, source), call).with_tokens(token_of)


def _reasoning(token_of: Callable[[str], int | None], source: str) -> ReasoningForm | None:
    for form in forms.REASONING:
        texts = form.begin.text, form.end.text
        if all(token_of(text) is not None for text in texts) or all(t in source for t in texts):
            return form
    for form in forms.REASONING:  # a marker may be several tokens
        if token_of(form.end.text) is not None and form.begin.text in source:
            return form
    return None


def _shown_call(rendered: str) -> CallForm | None:
    """Return the form in which a call was rendered."""
    at = rendered.rfind(PROBE_TOOL.name)
    if at < 0:
        return None
    for form in forms.CALLS:
        opening = form.opening.text or "{"
        begin = rendered.rfind(opening, 0, at)
        if begin >= 0 and _reads(form, rendered[begin:]):
            return form
    return None


def _reads(form: CallForm, text: str) -> bool:
    """Return whether a form finds the probe's call at the beginning of a text."""
    reader = MarkedAnswer(AnswerForms(call=form), CallOptions((PROBE_TOOL,)))
    reader.push(-1, text, "")
    reader.finish(ended=True)
    found: list[Any] = reader.parts.take()
    if found[:1] != [Begin("call", PROBE_TOOL.name)]:
        return False
    return bool(json.loads(found[1]) == PROBE_ARGUMENTS)
