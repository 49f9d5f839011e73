"""Renders conversations with a model's chat template.

Templates differ in what they accept. Trial conversations at load show what a model's template does
with tools, results, late system messages and reasoning; requests are then adapted to that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvd.worker.answer.find import PROBE_ARGUMENTS, PROBE_TOOL
from kvd.worker.answer.tools import as_openai
from kvd.worker.text import system_notes
from kvd.worker.text.efforts import find_efforts, nearest_effort
from protocol.errors import InvalidRequest
from protocol.tools import ChatOptions
from protocol.types import ChatMessage

TEMPLATE_BYTES = 128 * 1024 * 1024
"""Bytes that rendering the messages of a request may take."""
TEMPLATE_SECONDS = 5.0
"""Seconds of CPU time that rendering may take. Measured: 0.7 s for 100,000 short messages."""
_SWITCHES = ("enable_thinking", "thinking")
_ASKED = {"role": "user", "content": "probe question"}
_ANSWER = {"role": "assistant", "content": "probe answer"}
_MORE = {"role": "user", "content": "probe again"}
_NOTE = {"role": "system", "content": "probe note"}
_RESULT = {
    "role": "tool", "content": "probe result", "tool_call_id": "probe0001", "name": PROBE_TOOL.name,
}  # fmt: skip
_OWN_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation", "max_length",
}  # fmt: skip
Limit = Callable[[Callable[[], str]], str]


class ChatTemplate:
    """The template of one model, and what it does with trial conversations."""

    def __init__(self, wrapper: Any, limit: Limit) -> None:
        """Render the trial conversations.

        ``wrapper`` and ``limit``: see `Text`.
        """
        self._wrapper = wrapper
        self._limit = limit
        self.exists = bool(wrapper.has_chat_template)
        self.source = str(wrapper.chat_template or "")
        self._too_slow = False
        """Whether a trial conversation took too long or too much memory: then no other is tried."""
        self._names_thinking = "thinking" in self.source and "reasoning_content" not in self.source
        plain = self._try([_ASKED])
        self.wants_text = False
        """Whether arguments of calls are given to the template as JSON text."""
        self.rendered_call = self._render_call()
        self.system = "probe note" in self._try([_NOTE, _ASKED])
        self.late_system = self._in_order([_ASKED, _ANSWER, _NOTE, _MORE])
        self.lists_tools = PROBE_TOOL.name in self._try([_ASKED], tools=[as_openai(PROBE_TOOL)])
        self.tool_results = self.rendered_call != "" and "probe result" in self._try(
            [_ASKED, self._call(), _RESULT]
        )
        self.switch = next((name for name in _SWITCHES if self._switches(name)), None)
        """Argument that turns reasoning on and off."""
        self.reasons_by_default = self.switch is None or plain != self._try(
            [_ASKED], **{self.switch: False}
        )
        """Whether the model reasons if a request does not turn it on or off."""
        self.efforts = find_efforts(
            plain, lambda value: self._try([_ASKED], reasoning_effort=value)
        )
        """Known values of the reasoning effort, in ascending order."""

    def render(self, messages: Sequence[ChatMessage], chat: ChatOptions) -> str:
        """Return the prompt; raises `InvalidRequest`."""
        adapted = system_notes.place(messages, system=self.system, late=self.late_system)
        content = [self._message(message) for message in adapted]
        arguments = self._arguments(chat)
        try:
            return self._limit(lambda: self._apply(content, arguments))
        except (MemoryError, TimeoutError) as error:
            took = f"{TEMPLATE_BYTES >> 20} MiB"
            if isinstance(error, TimeoutError):
                took = f"{TEMPLATE_SECONDS:g} s of CPU time"
            raise InvalidRequest(
                f"the model's chat template takes more than {took} for these messages; send"
                " fewer, or use a model with another template",
                field="messages",
            ) from error
        except Exception as error:  # templates raise any error, mostly about roles
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error

    def may_reason(self, chat: ChatOptions) -> bool:
        """Return whether reasoning is on for a request; without a switch it always may be."""
        if self.switch is None:
            return True
        return bool(self._arguments(chat).get(self.switch, self.reasons_by_default))

    def _apply(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        settings: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **arguments}
        wrapper = self._wrapper
        if wrapper._chat_template is None:  # noqa: SLF001 - the wrapper would turn reasoning on
            wrapper, settings["return_dict"] = wrapper._tokenizer, False  # noqa: SLF001
        text: str = wrapper.apply_chat_template(list(messages), **settings)
        return text

    def _arguments(self, chat: ChatOptions) -> dict[str, Any]:
        arguments = dict(chat.template)
        if own := _OWN_ARGUMENTS & arguments.keys():
            raise InvalidRequest(
                f"chat.template has the argument {min(own)!r}, which kvd sets itself; remove it",
                field="chat.template",
            )
        if chat.tools and chat.tool_choice != "none":
            arguments["tools"] = [as_openai(tool) for tool in chat.tools]
        reasoning = chat.reasoning
        if reasoning is None and chat.effort is not None:
            reasoning = chat.effort != "none"
        if reasoning is not None and self.switch is not None:
            arguments.setdefault(self.switch, reasoning)
        if chat.effort is not None and self.efforts:
            arguments.setdefault("reasoning_effort", nearest_effort(chat.effort, self.efforts))
        return arguments

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        content: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            name = "thinking" if self._names_thinking else "reasoning_content"
            content[name] = message.reasoning
        if message.tool_calls:
            content["tool_calls"] = [
                self._tool_call(call.name, call.arguments, call.id) for call in message.tool_calls
            ]
        if message.role != "tool":
            return content
        if not self.tool_results:
            name = f" of {message.name}" if message.name else ""
            return {"role": "user", "content": f"Result{name}: {message.content}"}
        return {**content, "tool_call_id": message.tool_call_id, "name": message.name}

    def _tool_call(self, name: str, arguments: str, call_id: str) -> dict[str, Any]:
        value: Any = arguments
        if not self.wants_text:
            try:
                value = json.loads(arguments)
            except (ValueError, RecursionError):  # cut off, or written so by the model
                value = None
            if not isinstance(value, dict):
                value = {"arguments": arguments}
        function = {"name": name, "arguments": value}
        return {"id": call_id, "type": "function", "function": function}

    # Trial conversations.

    def _try(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Return a rendered conversation; empty if the template refuses it."""
        if not self.exists or self._too_slow:
            return ""
        try:
            return self._limit(lambda: self._apply(messages, arguments))
        except (MemoryError, TimeoutError):
            self._too_slow = True
            return ""
        except Exception:  # noqa: BLE001 - templates raise any error
            return ""

    def _call(self) -> dict[str, Any]:
        arguments = json.dumps(PROBE_ARGUMENTS)
        call = self._tool_call(PROBE_TOOL.name, arguments, "probe0001")
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _render_call(self) -> str:
        """Render a call with the arguments as an object, or as text if the template wants that."""
        tools = [as_openai(PROBE_TOOL)]
        for self.wants_text in (False, True):
            for rest in ([_RESULT], []):
                text = self._try([_ASKED, self._call(), *rest], tools=tools)
                if PROBE_TOOL.name in text.partition("probe question")[2] and "{'" not in text:
                    return text
        self.wants_text = False
        return ""

    def _in_order(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether all messages are rendered, each after the one before it."""
        text, at = self._try(messages), 0
        for message in messages:
            at = text.find(message["content"], at)
            if at < 0:
                return False
        return True

    def _switches(self, name: str) -> bool:
        on, off = (self._try([_ASKED], **{name: value}) for value in (True, False))
        return bool(on and off) and on != off
