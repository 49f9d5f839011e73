"""One output item while its text arrives: the events of its beginning, its text and its end.

Sans-io. An event is its type and its own fields; `kvd.http.responses_api.answer` adds the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from msgspec import UNSET, Raw

from kvd.http.responses_api.freeform import InputReader
from kvd.http.responses_api.objects import (
    NO_LOGPROBS,
    CustomCall,
    FunctionCall,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from kvd.http.responses_api.sealed import seal
from kvd.http.responses_api.text_logprobs import encoded
from kvd.http.responses_api.tools import ToolName
from protocol.errors import InvalidRequest
from protocol.types import TokenLogprob

Events = Iterator[tuple[str, dict[str, Any]]]
"""Types without ``response.``, and fields. All belong to the item."""
MOST_LOGPROBS = 8 * 1024 * 1024
"""Maximum bytes of a message's logprobs that its end repeats, which it does four times."""


class OpenItem(ABC):
    """An item whose text still arrives: `begin`, `push` each piece, `end`."""

    prefix: ClassVar[str]
    """Prefix of the item's id."""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as it is now."""

    @abstractmethod
    def begin(self) -> Events:
        """Yield the events between ``output_item.added`` and the first text."""

    @abstractmethod
    def push(self, text: str) -> Events:
        """Take the next piece of the text."""

    @abstractmethod
    def end(self) -> Events:
        """Yield the events before ``output_item.done``."""


class OpenMessage(OpenItem):
    """A message to the reader."""

    prefix = "msg"

    def __init__(self, item_id: str, *, streams: bool) -> None:
        super().__init__(item_id)
        self._streams = streams
        self._logprobs = bytearray()
        self._found: Sequence[TokenLogprob] = ()
        self._only_deltas = False
        """The logprobs exceed `MOST_LOGPROBS`: the end of the message has none."""

    def item(self, status: ItemStatus) -> MessageItem:
        content = [] if status == "in_progress" else [self._content()]
        return MessageItem(id=self.id, status=status, content=content)

    def _content(self) -> OutputText:
        return OutputText(self.text, logprobs=Raw(b"[" + self._logprobs + b"]"))

    def add_logprobs(self, found: Sequence[TokenLogprob]) -> None:
        """Take the tokens of the next piece of the text, before the piece."""
        self._found = found

    def begin(self) -> Events:
        yield "content_part.added", {"content_index": 0, "part": OutputText()}

    def push(self, text: str) -> Events:
        self._pieces.append(text)
        logprobs = NO_LOGPROBS
        if self._found:
            items, self._found = encoded(self._found), ()
            self._keep(items)
            logprobs = Raw(b"[%b]" % items)
        yield "output_text.delta", {"content_index": 0, "delta": text, "logprobs": logprobs}

    def _keep(self, items: bytes) -> None:
        if self._only_deltas:
            return
        if self._logprobs:
            self._logprobs += b","
        self._logprobs += items
        if len(self._logprobs) <= MOST_LOGPROBS:
            return
        if not self._streams:
            raise InvalidRequest(
                f"the logprobs of the answer in one piece would exceed {MOST_LOGPROBS} bytes; "
                "request a stream (stream: true), or less (top_logprobs, max_output_tokens)",
                field="stream",
            )
        self._only_deltas = True
        self._logprobs.clear()

    def end(self) -> Events:
        content = self._content()
        done = {"content_index": 0, "text": content.text, "logprobs": content.logprobs}
        yield "output_text.done", done
        yield "content_part.done", {"content_index": 0, "part": content}


class OpenReasoning(OpenItem):
    """Reasoning, as content or as its own summary."""

    prefix = "rs"

    def __init__(self, item_id: str, *, as_summary: bool, sealed: bool) -> None:
        super().__init__(item_id)
        self._as_summary = as_summary
        self._sealed = sealed

    def item(self, status: ItemStatus) -> ReasoningItem:
        if status == "in_progress":
            return ReasoningItem(id=self.id)
        text = self.text
        return ReasoningItem(
            id=self.id,
            status=status,
            summary=[SummaryText(text)] if self._as_summary else [],
            content=UNSET if self._as_summary else [ReasoningText(text)],
            encrypted_content=seal(text) if self._sealed else None,
        )

    def begin(self) -> Events:
        if self._as_summary:
            yield "reasoning_summary_part.added", {"summary_index": 0, "part": SummaryText()}
        else:
            yield "content_part.added", {"content_index": 0, "part": ReasoningText()}

    def push(self, text: str) -> Events:
        self._pieces.append(text)
        if self._as_summary:
            yield "reasoning_summary_text.delta", {"summary_index": 0, "delta": text}
        else:
            yield "reasoning_text.delta", {"content_index": 0, "delta": text}

    def end(self) -> Events:
        text = self.text
        if self._as_summary:
            yield "reasoning_summary_text.done", {"summary_index": 0, "text": text}
            yield "reasoning_summary_part.done", {"summary_index": 0, "part": SummaryText(text)}
        else:
            yield "reasoning_text.done", {"content_index": 0, "text": text}
            yield "content_part.done", {"content_index": 0, "part": ReasoningText(text)}


class OpenFunctionCall(OpenItem):
    """A call of a function: the text is its arguments."""

    prefix = "fc"

    def __init__(self, item_id: str, call: str, name: ToolName) -> None:
        super().__init__(item_id)
        self._call = call
        self._name = name

    def item(self, status: ItemStatus) -> FunctionCall:
        return FunctionCall(
            id=self.id,
            call_id=self._call,
            name=self._name.name,
            namespace=self._name.namespace or UNSET,
            arguments=self.text,
            status=status,
        )

    def begin(self) -> Events:
        yield from ()

    def push(self, text: str) -> Events:
        self._pieces.append(text)
        yield "function_call_arguments.delta", {"delta": text}

    def end(self) -> Events:
        done = {"name": self._name.name, "arguments": self.text}
        yield "function_call_arguments.done", done


class OpenCustomCall(OpenItem):
    """A call of a custom tool: the text is its arguments, of which the client gets the input."""

    prefix = "ctc"

    def __init__(self, item_id: str, call: str, name: ToolName) -> None:
        super().__init__(item_id)
        self._call = call
        self._name = name
        self._reader = InputReader()

    def item(self, status: ItemStatus) -> CustomCall:
        return CustomCall(
            id=self.id,
            call_id=self._call,
            name=self._name.name,
            namespace=self._name.namespace or UNSET,
            input=self._reader.input,
            status=status,
        )

    def begin(self) -> Events:
        yield from ()

    def push(self, text: str) -> Events:
        return self._delta(self._reader.push(text))

    def end(self) -> Events:
        yield from self._delta(self._reader.finish())
        yield "custom_tool_call_input.done", {"input": self._reader.input}

    def _delta(self, text: str) -> Events:
        if text:
            yield "custom_tool_call_input.delta", {"delta": text}
