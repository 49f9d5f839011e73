"""Renders conversations with a model's chat template.

Templates differ in what they accept. Trial conversations at load show what a model's template does
with tools, results, late system messages and reasoning; requests are then adapted to that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kvd.worker.answer.find import PROBE_ARGUMENTS, PROBE_TOOL
from kvd.worker.answer.forms import CallForm
from kvd.worker.answer.tools import as_openai
from kvd.worker.text import system_notes, tool_notes
from kvd.worker.text.efforts import find_efforts, nearest_effort
from kvd.worker.text.template_messages import TemplateMessages, joined, with_answers
from protocol.errors import InvalidRequest
from protocol.tools import ChatOptions, ToolCall
from protocol.types import ChatMessage

TEMPLATE_BYTES = 128 * 1024 * 1024
"""Bytes that rendering the messages of a request may take."""
TEMPLATE_SECONDS = 5.0
"""Seconds of CPU time that rendering may take. Measured: 0.7 s for 100,000 short messages."""
_SWITCHES = ("enable_thinking", "thinking")
_ASKED = ChatMessage("user", "probe question")
_ANSWER = ChatMessage("assistant", "probe answer")
_MORE = ChatMessage("user", "probe again")
_NOTE = ChatMessage("system", "probe note")
_CALLED = ToolCall(PROBE_TOOL.name, json.dumps(PROBE_ARGUMENTS), "probe0001")
_CALL = ChatMessage("assistant", "", tool_calls=[_CALLED])
_OTHER = ToolCall(PROBE_TOOL.name, '{"probe_key": "second value"}', "probe0002")
_VALUE = PROBE_ARGUMENTS["probe_key"]
_RESULT = ChatMessage("tool", "probe result", tool_call_id="probe0001", name=PROBE_TOOL.name)
_TOOLS = [as_openai(PROBE_TOOL)]
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
        self.messages = TemplateMessages(
            names_thinking="thinking" in self.source and "reasoning_content" not in self.source
        )
        plain = self._try([_ASKED])
        self.tools_argument = "tools"
        """Name of the template's argument that lists the tools."""
        self.asked = self._ask_with_tools()
        """A question with a tool that may be called, rendered."""
        self.rendered_call = self._render_call()
        self.system = "probe note" in self._try([_NOTE, _ASKED])
        self.late_system = self._in_order([_ASKED, _ANSWER, _NOTE, _MORE])
        self.lists_tools = PROBE_TOOL.name in self.asked
        self.notes_tools = False
        """Whether tools are listed in the system message (`note_tools`)."""
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

    @property
    def usable(self) -> bool:
        """Whether there is a template, and trial conversations took little time and memory."""
        return self.exists and not self._too_slow

    def render(self, messages: Sequence[ChatMessage], chat: ChatOptions) -> str:
        """Return the prompt; raises `InvalidRequest`."""
        if self.notes_tools and chat.tools and chat.tool_choice != "none":
            assert self.messages.form is not None
            messages = tool_notes.with_note(messages, chat, self.messages.form)
        placed = system_notes.place(messages, system=self.system, late=self.late_system)
        arguments = self._arguments(chat)
        try:
            return self._limit(lambda: self._apply_or_join(placed, arguments))
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

    def use_form(self, form: CallForm | None) -> None:
        """Take the form of calls, and find out whether the template shows results of tools."""
        self.messages.form = form
        messages = [_ASKED, _CALL, _RESULT]
        # Some templates take no conversation without tools.
        shown = self._try(messages) or self._try(messages, **{self.tools_argument: _TOOLS})
        known = form is not None or self.rendered_call != ""
        self.messages.shows_results = known and _RESULT.content in shown

    def note_tools(self, form: CallForm, *, known: bool) -> None:
        """List tools in the system message, in which the model is asked to use a form.

        ``known``: whether the template's calls have this form. Otherwise, earlier calls and results
        are text.
        """
        self.notes_tools = True
        if known:
            self.use_form(form)
        else:
            self.messages = TemplateMessages(
                names_thinking=self.messages.names_thinking,
                shows_calls=False,
                shows_results=False,
                form=form,
            )

    def _apply_or_join(self, messages: Sequence[ChatMessage], arguments: Mapping[str, Any]) -> str:
        """Render messages as the template shows them.

        If the template refuses them, successive ones of a role are joined, and then blank answers
        are inserted: many templates want the roles to alternate.
        """
        adapted = self.messages.adapt(messages)
        try:
            return self._apply(adapted, arguments)
        except (MemoryError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - templates raise any error
            refusal = error
        fewer = joined(adapted)
        for other in (fewer, with_answers(fewer)):
            try:
                return self._apply(other, arguments)
            except (MemoryError, TimeoutError):
                raise
            except Exception:  # noqa: BLE001, S112 - the first refusal is reported
                continue
        raise refusal

    def _apply(self, messages: Sequence[ChatMessage], arguments: Mapping[str, Any]) -> str:
        settings: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **arguments}
        wrapper = self._wrapper
        if wrapper._chat_template is None:  # noqa: SLF001 - the wrapper would turn reasoning on
            wrapper, settings["return_dict"] = wrapper._tokenizer, False  # noqa: SLF001
        content = list(map(self.messages.convert, messages))
        text: str = wrapper.apply_chat_template(content, **settings)
        return text

    def _arguments(self, chat: ChatOptions) -> dict[str, Any]:
        arguments = dict(chat.template)
        if own := _OWN_ARGUMENTS & arguments.keys():
            raise InvalidRequest(
                f"chat.template has the argument {min(own)!r}, which kvd sets itself; remove it",
                field="chat.template",
            )
        if chat.tools and chat.tool_choice != "none" and not self.notes_tools:
            arguments[self.tools_argument] = [as_openai(tool) for tool in chat.tools]
        reasoning = chat.reasoning
        if reasoning is None and chat.effort is not None:
            reasoning = chat.effort != "none"
        if reasoning is not None and self.switch is not None:
            arguments.setdefault(self.switch, reasoning)
        if chat.effort is not None and self.efforts:
            arguments.setdefault("reasoning_effort", nearest_effort(chat.effort, self.efforts))
        return arguments

    # Trial conversations.

    def _try(self, messages: Sequence[ChatMessage], **arguments: Any) -> str:
        """Return a rendered conversation; empty if the template refuses it."""
        if not self.exists or self._too_slow:
            return ""
        try:
            return self._limit(lambda: self._apply(self.messages.adapt(messages), arguments))
        except (MemoryError, TimeoutError):
            self._too_slow = True
            return ""
        except Exception:  # noqa: BLE001 - templates raise any error
            return ""

    def _ask_with_tools(self) -> str:
        """Render a question with a tool, and find the name of the template's argument for tools.

        SmolLM3's is ``xml_tools``.
        """
        for self.tools_argument in ("xml_tools", "tools"):
            text = self._try([_ASKED], **{self.tools_argument: _TOOLS})
            if PROBE_TOOL.name in text:
                break
        return text

    def _render_call(self) -> str:
        """Render a call with the arguments as an object, or as text if the template wants that."""
        for self.messages.arguments_are_text in (False, True):
            for rest in ([_RESULT], []):
                text = self._try_call([_CALLED], rest)
                if _VALUE in text and "{'" not in text.partition(_ASKED.content)[2]:
                    long = replace(_CALLED, id="probe-call-of-any-length")
                    self.messages.short_ids = _VALUE not in self._try_call([long], rest)
                    found = self._try_call([_CALLED, _OTHER], rest)
                    self.messages.single_calls = "second value" not in found
                    return text
        self.messages.arguments_are_text = self.messages.shows_calls = False
        return ""

    def _try_call(self, calls: Sequence[ToolCall], rest: Sequence[ChatMessage]) -> str:
        results = [replace(one, tool_call_id=calls[0].id) for one in rest]
        messages = [_ASKED, replace(_CALL, tool_calls=list(calls)), *results]
        return self._try(messages, **{self.tools_argument: _TOOLS})

    def _in_order(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether all messages are rendered, each after the one before it."""
        text, at = self._try(messages), 0
        for message in messages:
            at = text.find(message.content, at)
            if at < 0:
                return False
        return True

    def _switches(self, name: str) -> bool:
        on, off = (self._try([_ASKED], **{name: value}) for value in (True, False))
        return bool(on and off) and on != off
