"""Finds the forms of a model's answers from its chat template and vocabulary, at load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvd.worker.answer import forms
from kvd.worker.answer.forms import (
    AnswerForms,
    CallForm,
    JsonBody,
    NamedBody,
    ReasoningForm,
    XmlBody,
)
from kvd.worker.answer.marked import CallOptions, MarkedAnswer
from kvd.worker.answer.parts import Begin
from protocol.tools import Tool

PROBE_TOOL = Tool(
    name="probe_tool",
    description="Probe.",
    parameters={
        "type": "object",
        "properties": {"probe_key": {"type": "string", "description": "Probe."}},
        "required": ["probe_key"],
    },
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
    token_of: Callable[[str], int | None],
    *,
    source: str,
    asked: str,
    rendered_call: str,
    parser: str,
) -> AnswerForms:
    """Return a model's forms.

    ``token_of``: id of a text that is one token. ``source``: the template. ``asked``: the prompt of
    a question with `PROBE_TOOL`, rendered. ``rendered_call``: the same conversation with an answer
    that calls the tool; empty if the template does not show calls. ``parser``: name of the parser
    that mlx-lm chose; it may be empty.
    """
    harmony = forms.HARMONY
    markers = (harmony.start, harmony.channel, harmony.message, harmony.end, harmony.call)
    if all(token_of(marker.text) is not None for marker in markers):
        return AnswerForms(harmony=harmony).with_tokens(token_of)
    if rendered_call:
        call = _shown_call(asked, rendered_call)
    else:
        call = _PARSERS.get(parser) or _named_form(source)
    shown = f"{source}\n{asked}\n{rendered_call}"
    return AnswerForms(_reasoning(token_of, shown), call).with_tokens(token_of)


def _reasoning(token_of: Callable[[str], int | None], shown: str) -> ReasoningForm | None:
    """Return the form of reasoning. ``shown``: the template and what it renders."""
    for form in forms.REASONING:
        texts = form.begin.text, form.end.text
        if all(token_of(text) is not None for text in texts) or all(t in shown for t in texts):
            return form
    for form in forms.REASONING:  # a marker may be several tokens
        if token_of(form.end.text) is not None and form.begin.text in shown:
            return form
    return None


def _named_form(source: str) -> CallForm | None:
    """Return the form whose texts all occur in a template; of several, the one with most texts."""
    described = [form for form in forms.CALLS if all(text in source for text in _texts(form))]
    return max(described, key=lambda form: len(_texts(form)), default=None)


def _texts(form: CallForm) -> list[str]:
    """Return the texts that identify a form in a template.

    A form without an opening marker gets a text that never occurs, so that it is never chosen.
    """
    texts = [marker.text for marker in AnswerForms(call=form).call_markers if marker]
    if isinstance(form.body, XmlBody):
        texts.append(form.body.before_name.strip())
    if isinstance(form.body, NamedBody | XmlBody):
        texts.append(form.body.after_name.strip())
    return [text for text in texts if text] if form.opening else ["\0"]


def _shown_call(asked: str, rendered: str) -> CallForm | None:
    """Return the form in which a call was rendered."""
    at = rendered.rfind(PROBE_TOOL.name)
    pairs = zip(asked, rendered, strict=False)
    answer = next((at for at, (one, other) in enumerate(pairs) if one != other), len(asked))
    for form in forms.CALLS:
        begin = rendered.rfind(form.opening.text or "{", 0, max(at, 0))
        if begin < 0 or not _reads(form, rendered[begin:]):
            continue
        if form.opening or not rendered[answer:begin].strip():
            return form
    return None


def _reads(form: CallForm, text: str) -> bool:
    """Return whether a form finds the probe's call at the beginning of a text."""
    if isinstance(form.body, JsonBody) and not _has_keys(form.body, text[len(form.opening.text) :]):
        return False
    reader = MarkedAnswer(AnswerForms(call=form), CallOptions((PROBE_TOOL,)))
    reader.push(-1, text, "")
    reader.finish(ended=True)
    found: list[Any] = reader.parts.take()
    if found[:1] != [Begin("call", PROBE_TOOL.name)]:
        return False
    return bool(json.loads(found[1]) == PROBE_ARGUMENTS)


def _has_keys(body: JsonBody, text: str) -> bool:
    """Return whether a text begins with an object, or a list of objects, that has a form's keys."""
    text = text.lstrip()
    if body.listed != text.startswith("["):
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    first = value[0] if body.listed and value else value
    content = first.get("function", first) if isinstance(first, dict) else None
    keys = {body.name_key, body.arguments_key}
    return isinstance(content, dict) and keys <= content.keys()
