"""Tools in the system message, for chat templates that do not list them, or not in a known form."""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec.structs import replace

from kvd.worker.answer.forms import CallForm
from kvd.worker.answer.tools import as_openai
from kvd.worker.answer.written import write_calls
from protocol.tools import Tool, ToolCall
from protocol.types import ChatMessage

_NOTE = """\
You can call the following tools, which are described as JSON:
{tools}
To call a tool, write its name and its arguments in this form:
{example}
Several calls may follow each other. The results come in the next message. If no tool is needed,\
 answer without a call."""
_EXAMPLE = ToolCall("NAME", json.dumps({"ARGUMENT": "VALUE"}))


def with_note(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], form: CallForm
) -> list[ChatMessage]:
    """Return the messages with the tools at the end of the first system message."""
    listed = "\n".join(json.dumps(as_openai(tool), ensure_ascii=False) for tool in tools)
    note = _NOTE.format(tools=listed, example=write_calls(form, [_EXAMPLE]))
    if messages and messages[0].role == "system":
        first = messages[0]
        parts = filter(None, (first.content, note))
        return [replace(first, content="\n\n".join(parts)), *messages[1:]]
    return [ChatMessage("system", note), *messages]
