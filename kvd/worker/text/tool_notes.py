"""Lists tools in the system message if the chat template does not list them.

Also if it shows calls in an unknown form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec.structs import replace

from kvd.worker.answer.forms import CallForm
from kvd.worker.answer.tools import as_openai
from kvd.worker.answer.written import write_calls
from protocol.tools import ChatOptions, ToolCall
from protocol.types import ChatMessage

_NOTE = """\
You can call the following tools, which are described as JSON:
{tools}
To call a tool, write its name and its arguments in this form:
{example}
{several}The results come in the next message. If no tool is needed, answer without a call."""
_EXAMPLE = ToolCall("NAME", json.dumps({"ARGUMENT": "VALUE"}))


def with_note(
    messages: Sequence[ChatMessage], chat: ChatOptions, form: CallForm
) -> list[ChatMessage]:
    """Return the messages with the tools at the end of the first system message."""
    listed = "\n".join(json.dumps(as_openai(tool), ensure_ascii=False) for tool in chat.tools)
    several = "Several calls may follow each other. " if chat.parallel_tool_calls else ""
    example = write_calls(form, [_EXAMPLE])
    note = _NOTE.format(tools=listed, example=example, several=several)
    if messages and messages[0].role == "system":
        first = messages[0]
        parts = filter(None, (first.content, note))
        return [replace(first, content="\n\n".join(parts)), *messages[1:]]
    return [ChatMessage("system", note), *messages]
