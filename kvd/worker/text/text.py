"""Tokenization of prompts and detokenization of completions.

A raw *prompt* is tokenized with the tokens that the tokenizer puts before any text, such as BOS.
*Messages* are rendered with the model's chat template. *Tokens* are used unchanged. The text of a
completion continues a raw prompt, so that both can be joined; after messages it is independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvd.worker.grammar.answers import AnswerContext
from kvd.worker.grammar.vocabulary import Vocabulary
from kvd.worker.text.abilities import abilities_of, forms_of
from kvd.worker.text.choices import check_token_ids
from kvd.worker.text.detokenizer import BytesTable, ContextDecoder, Detokenizer, special_ids
from kvd.worker.text.failures import is_failure, one_line
from kvd.worker.text.places import Conversation, common, find_place
from kvd.worker.text.splitting import Splitting
from kvd.worker.text.stream import TextStream
from kvd.worker.text.template import ChatTemplate, Limit
from kvd.worker.text.token_texts import TokenTexts
from protocol.cache_outcome import PromptPlace
from protocol.errors import ContextTooLong, EmptyPrompt, InvalidRequest
from protocol.tools import ChatOptions
from protocol.types import ChatMessage, TokenLogprob
from protocol.worker import Submit, Tokenize, Tokenized

_PROBE_CHARS = 4
"""Characters per token of the context length. Tokens of longer texts are counted first, in pieces,
because tokenizing takes up to 240 bytes per character (measured)."""
_PIECE_CHARS = 1 << 16
_PIECE_SLACK = 64
"""Tokens that a piece may have in addition because its ends are cut."""


class Text:
    """The tokenizer and chat template of a model."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        context_length: int,
        limit_template: Limit = lambda render: render(),
        name: str = "this model",
    ) -> None:
        """Find out what the model's template and vocabulary allow.

        ``tokenizer``: a `FastWrapper`, or an `mlx_lm.tokenizer_utils.TokenizerWrapper`.

        ``limit_template`` calls a function. It raises ``MemoryError`` beyond `TEMPLATE_BYTES`, and
        ``TimeoutError`` beyond `TEMPLATE_SECONDS`. ``name``: the model in errors.
        """
        self._name = name
        self._tokenizer = tokenizer._tokenizer  # noqa: SLF001 - the wrapper hides decode's options
        self.vocab_size = vocab_size
        self.context_length = context_length
        vocabulary = self._tokenizer.get_vocab()
        size = 1 + max(vocabulary.values())
        self._table = BytesTable.of(self._tokenizer, size)
        self._special = special_ids(self._tokenizer)
        self._prefix = _prefix_of(self._tokenizer)
        self._token_texts = TokenTexts(self._tokenizer, self._table, self._special, size)
        self.eos_ids: frozenset[int] = frozenset(tokenizer.eos_token_ids)
        self.template = ChatTemplate(tokenizer, limit_template)
        forms = forms_of(tokenizer, self.template, vocabulary)
        self.split = Splitting(self._tokenizer, forms)
        self.abilities = abilities_of(self.template, forms)
        """What the chat template and the vocabulary allow."""

    @property
    def has_chat_template(self) -> bool:
        return self.template.exists

    def prompt_text(self, request: Submit) -> str:
        """Check the form of a request, and return its prompt's text; empty if it has tokens.

        Chat templates are run here, under the limits of the main thread (`process.cpu_limit`).
        """
        check_token_ids(request, self.vocab_size)
        forms = (request.prompt, request.messages, request.tokens)
        if sum(form is not None for form in forms) != 1:
            raise InvalidRequest("give exactly one of prompt, messages and tokens", field="prompt")
        return "" if request.tokens is not None else self._text_of(request)

    def encode(self, request: Submit, text: str | None = None) -> list[int]:
        """Return the prompt's tokens: at least one, and fewer than the context length.

        ``text``: what `prompt_text` returned. With it, any thread may call this method.
        """
        if text is None:
            text = self.prompt_text(request)
        if request.tokens is not None:
            tokens = self._check_tokens(request.tokens)
        else:
            tokens = self._encode_text(request, text)
            self._check_known(tokens)
        if not tokens:
            raise EmptyPrompt("the prompt is empty; give at least one token")
        if len(tokens) >= self.context_length:
            raise self._too_long(f"has {len(tokens)} tokens", len(tokens))
        return tokens

    def tokenize(self, request: Tokenize) -> Tokenized:
        """Return a text's tokens. There may be none, or more than the context length."""
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", field="prompt")
        tokens = self._encode_text(request, self._text_of(request))
        first = tokens[: request.limit]
        texts = [self._token_texts.of(token)[0] for token in first] if request.texts else []
        return Tokenized(seq=request.seq, count=len(tokens), tokens=first, texts=texts)

    def stream(
        self,
        request: Submit,
        prompt: Sequence[int],
        choice: int = 0,
        *,
        has_valid_calls: bool = False,
    ) -> TextStream:
        """Return the stream of a choice; only answers to messages are split into parts.

        ``has_valid_calls``: whether a grammar keeps calls valid. Then their arguments are sent as
        they arrive; otherwise a call is sent once it is complete.
        """
        after = () if request.messages is not None else prompt
        if self._table is None:
            detokenizer: Detokenizer = ContextDecoder(self._tokenizer, self._special, after)
        else:
            detokenizer = self._table.stream(after)
        split = None
        if request.messages is not None:
            split = self.split.of(request, prompt, choice, streams=has_valid_calls)
        eos_ids = frozenset[int]() if request.ignore_eos else self.eos_ids
        return TextStream(
            detokenizer,
            stops=request.stop,
            ends=eos_ids | frozenset(request.stop_tokens),
            min_tokens=request.min_tokens,
            split=split,
        )

    def answer_context(self, request: Submit, prompt: Sequence[int]) -> AnswerContext:
        """Return what grammars have to know about the answer; nothing for raw prompts."""
        if request.messages is None:
            return AnswerContext()
        return AnswerContext(
            self.split.forms,
            self.split.special,
            self.split.end_of(prompt),
            not request.chat.continue_final and self.template.may_reason(request.chat),
        )

    @property
    def canonical(self) -> bool:
        """Whether the bytes of a text's tokens are those of the text."""
        return self._table is not None

    def vocabulary(self) -> Vocabulary:
        """Return the tokens as grammars see them."""
        size = max(self.vocab_size, self._token_texts.size)
        tokens = [self._token_texts.raw(token) for token in range(size)]
        return Vocabulary(
            tokens,
            self._special.union(self.split.special.values()),
            self.eos_ids,
            lambda text: self._tokenize(text, "grammar"),
            canonical=self.canonical,
        )

    def token_logprob(
        self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()
    ) -> TokenLogprob:
        """Return a token's logprob with the most likely tokens, as the client gets it."""
        others = [self._token_texts.alternative(*pair) for pair in top]
        text, raw = self._token_texts.of(token)
        return TokenLogprob(token, text, logprob, raw, others)

    def place_of(
        self, conversation: Conversation, prompt: Sequence[int], token: int, other: Sequence[int]
    ) -> PromptPlace | None:
        """Return the message or tool in which a conversation's prompt differs from another prompt.

        None: it is not known. ``token``: position of the first token that differs. ``other``: some
        tokens of the other prompt from there on.
        """
        try:
            text = self.template.render(conversation.messages, conversation.chat)
            at = self._offset(text, prompt, token)
            if at is None:
                return None
            # Both tokens may begin with the same characters, some of them of the message before.
            at += common(self.excerpt(prompt[token : token + len(other)]), self.excerpt(other))
            ends = [self._token_texts.of(one)[0] for one in self.eos_ids]
            return find_place(self.template, conversation, text, at, ends)
        except BaseException as error:  # templates and tokenizers raise any type
            if not is_failure(error):
                raise
            return None

    def _offset(self, text: str, prompt: Sequence[int], token: int) -> int | None:
        """Return the position in a text at which one of its tokens begins, if known."""
        before, data = self._bytes(prompt[:token]), text.encode("utf-8", "surrogatepass")
        if data.startswith(before):
            return len(before.decode("utf-8", "ignore"))
        if not getattr(self._tokenizer, "is_fast", False):
            return None
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return int(offsets[token][0]) if token < len(offsets) else None

    def excerpt(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens with special tokens; incomplete characters are U+FFFD."""
        return self._bytes(tokens).decode("utf-8", "replace")

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        table, raw = self._table, self._token_texts.raw
        if table is None:
            return b"".join(map(raw, tokens))
        return b"".join([table.bytes_of(token) or raw(token) for token in tokens])

    def _text_of(self, request: Submit | Tokenize) -> str:
        if request.prompt is not None:
            return request.prompt
        return self._render(request.messages or [], request.chat)

    def _encode_text(self, request: Submit | Tokenize, text: str) -> list[int]:
        if request.prompt is None:
            return self._tokens_of(text, "messages")
        tokens = self._tokens_of(text, "prompt")
        if tokens and self._prefix and tokens[: len(self._prefix)] != self._prefix:
            tokens = self._prefix + tokens
        return tokens

    def _check_tools(self, chat: ChatOptions) -> None:
        if chat.tools and chat.tool_choice != "none" and not self.abilities.tools:
            raise InvalidRequest(
                f"{self._name} cannot call tools: {self._lacks_tools}; remove tools, set "
                "tool_choice to none, or use a model that can (kvctl status MODEL lists it)",
                field="chat.tools",
            )

    @property
    def _lacks_tools(self) -> str:
        if not self.template.usable:
            return "its chat template takes too much time or memory"
        return "its chat template lists no tools"

    def _render(self, messages: list[ChatMessage], chat: ChatOptions) -> str:
        if not messages:
            return ""
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; send prompt instead of messages",
                field="messages",
            )
        self._check_tools(chat)
        if not chat.continue_final:
            return self.template.render(messages, chat)
        *before, final = messages
        self._check_continuable(final)
        text = self.template.render(before, chat)
        return f"{text}{self.split.closing(text)}{final.content}"

    def _check_continuable(self, message: ChatMessage) -> None:
        if message.role != "assistant" or message.tool_calls:
            raise InvalidRequest(
                "the last message cannot be continued; it must be the assistant's, with only text",
                field="messages",
            )
        if self.split.forms.harmony is not None:
            raise InvalidRequest(
                f"{self._name} writes its answers as several messages, which kvd cannot continue; "
                "let the conversation end with a message of the user",
                field="messages",
            )

    def _tokens_of(self, text: str, field: str) -> list[int]:
        if len(text) > _PROBE_CHARS * self.context_length:
            self._check_length(text, field)
        return self._tokenize(text, field)

    def _check_length(self, text: str, field: str) -> None:
        found, size = 0, min(_PIECE_CHARS, 8 * self.context_length)
        for start in range(0, len(text), size):
            piece = self._tokenize(text[start : start + size], field)
            found += max(0, len(piece) - _PIECE_SLACK)
            if found > self.context_length:
                raise self._too_long(f"has more than {found} tokens", found)

    def _tokenize(self, text: str, field: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except (UnicodeError, TypeError) as error:  # for example a lone surrogate
            raise InvalidRequest(f"the {field} is not valid text: {error}", field=field) from error
        except BaseException as error:  # tokenizers raise any type
            if not is_failure(error):
                raise
            raise InvalidRequest(
                f"the model's tokenizer fails on the {field} ({one_line(error)})", field=field
            ) from error

    def _check_tokens(self, tokens: list[int]) -> list[int]:
        for at, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"token {token} at {at} is outside the vocabulary of {self.vocab_size}",
                    field="tokens",
                )
        return list(tokens)

    def _check_known(self, tokens: list[int]) -> None:
        """Embeddings are read without a check of the index."""
        if tokens and (largest := max(tokens)) >= self.vocab_size:
            raise InvalidRequest(
                f"the model's tokenizer maps the prompt to token {largest}, which is outside the"
                f" model's vocabulary of {self.vocab_size}; change the prompt or the model",
                field="prompt",
            )

    def _too_long(self, reason: str, tokens: int) -> ContextTooLong:
        return ContextTooLong(
            f"the prompt {reason}; the model's context has {self.context_length} tokens, "
            "and the completion needs at least one",
            prompt_tokens=tokens,
            context_length=self.context_length,
        )


def _prefix_of(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, not those that it appends."""
    full = list(tokenizer.encode("a"))
    plain = list(tokenizer.encode("a", add_special_tokens=False))
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at]
    return full[:1] if full and full[0] == tokenizer.bos_token_id else []
