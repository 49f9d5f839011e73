"""Writes calls of earlier answers as text, for chat templates that do not show calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvd.worker.answer.forms import PYTHONIC, CallForm, JsonBody, NamedBody, XmlBody
from protocol.tools import ToolCall

_PLAIN = JsonBody()


def write_calls(form: CallForm | None, calls: Sequence[ToolCall]) -> str:
    """Return calls as text in a form; as JSON if it is not known or cannot be written.

    Whitespace may differ from what the model writes.
    """
    if form is None:
        return "\n".join(_json(_PLAIN, call) for call in calls)
    begin, end = form.begin.text + form.before, form.after + form.end.text
    listed = isinstance(form.body, JsonBody) and form.body.listed
    if listed or form.body == PYTHONIC.body:
        return f"{begin}[{', '.join(_body(form, call, 0) for call in calls)}]{end}"
    written = form.between.join(
        f"{begin}{_body(form, call, number)}{end}" for number, call in enumerate(calls)
    )
    if form.section is None:
        return written
    gap = "" if form.begin else form.between
    return f"{form.section[0].text}{gap}{written}{gap}{form.section[1].text}"


def _body(form: CallForm, call: ToolCall, number: int) -> str:
    body = form.body
    match body:
        case JsonBody():
            return _json(body, call)
        case NamedBody():
            counted = f":{number}" if body.numbered else ""
            name = f"{body.before_name}{call.name}{counted}{body.after_name}"
            return f"{name}{call.arguments}{body.end}"
        case XmlBody():
            pairs = "".join(_pairs(body, arguments_of(call)))
            return f"{body.before_name}{call.name}{body.after_name}{pairs}{body.end}"
        case _ if body == PYTHONIC.body:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments_of(call).items())
            return f"{call.name}({given})"
        case _:
            return _json(_PLAIN, call)


def arguments_of(call: ToolCall) -> Mapping[str, Any]:
    """Return the arguments; as text under ``arguments`` if they are no JSON object."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):  # cut off, or written so by the model
        value = None
    return value if isinstance(value, dict) else {"arguments": call.arguments}


def _json(body: JsonBody, call: ToolCall) -> str:
    content = {body.name_key: call.name, body.arguments_key: arguments_of(call)}
    return json.dumps(content, ensure_ascii=False)


def _pairs(body: XmlBody, arguments: Mapping[str, Any]) -> Iterator[str]:
    for key, value in arguments.items():
        text, after = value, body.after_key
        if not isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)
            after = body.after_json_key or after
        yield f"{body.before_key}{key}{after}{text}{body.after_value}"
