"""A model's tokenizer with the library ``tokenizers`` alone.

`FastTokenizer` has the methods of transformers' tokenizers that kvd and mlx-lm's detokenizers use,
`FastWrapper` those of mlx-lm's ``TokenizerWrapper``. The record's maker has compared the results of
both on the whole vocabulary, on texts, and on conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from tokenizers import AddedToken, Tokenizer

from kvd.worker.text.tokenizer_record import TokenizerRecord

_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
_UNKNOWN_LENGTH = 10**30
"""``model_max_length`` of a tokenizer without a known limit, as in transformers."""


class FastTokenizer:
    """The tokenizer of one record."""

    is_fast = True

    def __init__(self, record: TokenizerRecord) -> None:
        """Parse the record's JSON; raises what ``tokenizers`` raises."""
        self._backend = Tokenizer.from_buffer(record.tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = record.splits_special
        self.chat_template = record.chat_template
        self.all_special_ids = record.special_ids
        self.special_tokens_map = record.special_tokens
        self.bos_token_id = record.bos_id
        self.eos_token_id = record.eos_id
        self.model_max_length = record.model_max_length or _UNKNOWN_LENGTH
        self.clean_up_tokenization_spaces = record.cleans_up
        self._renderers: dict[str, Any] = {}

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens; raises ``TypeError`` for text with lone surrogates."""
        # Unlike `encode`, this releases the GIL, so that other threads go on.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        """Return ``input_ids``, and with offsets each token's characters (``offset_mapping``)."""
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        found: dict[str, Any] = {"input_ids": list(encoding.ids)}
        if return_offsets_mapping:
            found["offset_mapping"] = list(encoding.offsets)
        return found

    def decode(
        self,
        tokens: int | Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        ids = [tokens] if isinstance(tokens, int) else list(tokens)
        text = str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        cleans_up = clean_up_tokenization_spaces
        if self.clean_up_tokenization_spaces if cleans_up is None else cleans_up:
            for before, after in _CLEANED:
                text = text.replace(before, after)
        return text

    def get_vocab(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self._backend.get_added_tokens_decoder())

    @overload
    def convert_ids_to_tokens(self, tokens: int) -> str | None: ...

    @overload
    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str | None]: ...

    def convert_ids_to_tokens(self, tokens: int | Sequence[int]) -> str | list[str | None] | None:
        """Return the names of tokens; None for ids that the vocabulary does not have."""
        name_of = self._backend.id_to_token
        return name_of(tokens) if isinstance(tokens, int) else [name_of(one) for one in tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        return_dict: bool = False,
        **variables: Any,
    ) -> str:
        """Return a conversation as text; raises what the template raises.

        Raises ``ValueError`` without a template or messages, or if the prompt is to be tokenized,
        and ``TypeError`` if a document is no object.
        """
        if tokenize or return_dict:
            raise ValueError("only text can be returned; tokenize it with encode")
        source = self._template_for(has_tools=tools is not None)
        if not messages:
            raise ValueError("a conversation needs at least one message")
        if documents is not None and not all(isinstance(one, dict) for one in documents):
            raise TypeError("documents must be objects with title and text")
        if source not in self._renderers:
            from kvd.worker.text.rendering import Renderer  # noqa: PLC0415 - needs Jinja

            self._renderers[source] = Renderer(source)
        return str(
            self._renderers[source].render(
                messages,
                self.special_tokens_map | variables,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def _template_for(self, *, has_tools: bool) -> str:
        found = self.chat_template
        if isinstance(found, dict):
            found = found.get("tool_use" if has_tools else "default", found.get("default"))
        if found is None:
            raise ValueError("the model has no default chat template")
        return found


class FastWrapper:
    """A `FastTokenizer`, and what mlx-lm knows about the model's answers."""

    _chat_template = None
    """A template in Python of mlx-lm; models that have one need transformers."""

    def __init__(self, record: TokenizerRecord) -> None:
        self._tokenizer = FastTokenizer(record)
        self.has_chat_template = record.chat_template is not None
        self.chat_template = record.chat_template
        self.eos_token_ids = set(record.eos_ids)
        self.tool_parser_name = record.tool_parser
        self.model_max_length = self._tokenizer.model_max_length

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return `FastTokenizer.encode`, with special tokens."""
        return self._tokenizer.encode(text)
