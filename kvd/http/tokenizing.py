"""``POST /v1/tokenize``, and ``/tokenize`` as in vLLM: the tokens of a text or of messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Raw

from kvd.http.chat_api.conversation import Message, chat_messages
from kvd.http.chat_api.fields import Tools
from kvd.http.chat_api.options import chat_options
from kvd.http.requests import ABSENT, ChatRequest
from protocol import fields
from protocol.errors import InvalidRequest
from protocol.messages import MAX_LISTED_TOKENS, Tokenize
from protocol.tools import ChatOptions


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body: exactly one of ``prompt`` and ``messages``."""

    REFUSES_TYPOS: ClassVar[bool] = True

    model: fields.Name
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Tools | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    """Whether the answer includes each token's text."""
    limit: Annotated[int, Meta(ge=0, le=MAX_LISTED_TOKENS)] | None = None
    """Maximum tokens in the answer; the count is that of all."""

    # Without effect on kvd: tokens are those of a completion.
    add_special_tokens: Raw = ABSENT
    add_generation_prompt: Raw = ABSENT

    @property
    def call(self) -> Tokenize:
        """The daemon's request; raises `InvalidRequest`."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", field="prompt")
        chat, messages = ChatOptions(), None
        if self.messages is not None:
            messages = chat_messages(self.messages)
            chat = chat_options(
                ChatRequest(
                    model=self.model,
                    messages=self.messages,
                    tools=self.tools,
                    reasoning_effort=self.reasoning_effort,
                    enable_thinking=self.enable_thinking,
                    chat_template_kwargs=self.chat_template_kwargs,
                )
            )
        return Tokenize(
            id="http",
            model=self.model,
            prompt=self.prompt,
            messages=messages,
            chat=chat,
            limit=MAX_LISTED_TOKENS if self.limit is None else self.limit,
            texts=bool(self.return_token_strs),
        )


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    count: int
    max_model_len: int | None
    """Tokens of the model's context."""
    tokens: list[int]
    token_strs: list[str] | None = None
