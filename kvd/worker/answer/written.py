"""Writes calls of earlier answers as text, for chat templates that do not show calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvd.worker.answer.forms import PYTHONIC, CallForm, JsonBody, NamedBody, WholeBody, XmlBody
from protocol.tools import ToolCall

_PLAIN = JsonBody()


def write_calls(form: CallForm | None, calls: Sequence[ToolCall]) -> str:
    """Return calls as text in a form, whose whitespace may differ; as JSON without a form.

    A body that only mlx-lm's parsers read is replaced by JSON (`can_write`).
    """
    if form is None:
        return "\n".join(_json(_PLAIN, call, 0) for call in calls)
    begin, end = form.begin.text + form.before, form.after + form.end.text
    listed = isinstance(form.body, JsonBody) and form.body.listed
    if listed or form.body == PYTHONIC.body:
        listed_calls = ", ".join(_body(form, call, number) for number, call in enumerate(calls))
        return f"{begin}[{listed_calls}]{end}"
    written = form.between.join(
        f"{begin}{_body(form, call, number)}{end}" for number, call in enumerate(calls)
    )
    if form.section is None:
        return written
    gap = "" if form.begin else form.between
    return f"{form.section[0].text}{gap}{written}{gap}{form.section[1].text}"


def can_write(form: CallForm) -> bool:
    """Return whether calls in a form can be written as the model writes them."""
    return not isinstance(form.body, WholeBody) or form.body == PYTHONIC.body


def _body(form: CallForm, call: ToolCall, number: int) -> str:
    body = form.body
    match body:
        case JsonBody():
            return _json(body, call, number)
        case NamedBody():
            counted = f":{number}" if body.numbered else ""
            name = f"{body.before_name}{call.name}{counted}{body.after_name}"
            arguments = json.dumps(arguments_as_object(call), ensure_ascii=False)
            return f"{name}{arguments}{body.end}"
        case XmlBody():
            pairs = "".join(_pairs(body, arguments_as_object(call)))
            return f"{body.before_name}{call.name}{body.after_name}{pairs}{body.end}"
        case _ if body == PYTHONIC.body:
            given = ", ".join(
                f"{key}={value!r}" for key, value in arguments_as_object(call).items()
            )
            return f"{call.name}({given})"
        case _:
            return _json(_PLAIN, call, number)


def arguments_as_object(call: ToolCall) -> Mapping[str, Any]:
    """Return the arguments; as text under ``arguments`` if they are not a JSON object."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):  # cut off, or written so by the model
        value = None
    return value if isinstance(value, dict) else {"arguments": call.arguments}


def _json(body: JsonBody, call: ToolCall, number: int) -> str:
    content: dict[str, Any] = {body.id_key: str(number)} if body.id_key else {}
    content |= {body.name_key: call.name, body.arguments_key: arguments_as_object(call)}
    return json.dumps(content, ensure_ascii=False)


def _pairs(body: XmlBody, arguments: Mapping[str, Any]) -> Iterator[str]:
    for key, value in arguments.items():
        text, after = value, body.after_key
        if not isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)
            after = body.after_json_key or after
        yield f"{body.before_key}{key}{after}{text}{body.after_value}"
