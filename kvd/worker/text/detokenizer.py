"""Streaming detokenization: one token at a time, text never ends inside a character.

There are two implementations:

* `BytesTable`, for byte-level BPE (Qwen, Llama 3, GPT, newer Mistral models, the embedded model). A
  token is a string of bytes, so a table and an incremental UTF-8 decoder suffice. The table is used
  only if it agrees with the tokenizer's own decoding on the whole vocabulary.
* `ContextDecoder`, for all other tokenizers (SentencePiece, WordPiece, tokenizers in Python). It
  decodes the last tokens with and without the new one and takes the difference.

mlx-lm's streaming detokenizers are not used. The one for BPE drops a space at the start of the
completion and treats the NUL byte as a letter, and all of them show special tokens.

The text of a completion is that of the tokenizer's `decode`, without special tokens and without
its clean-up of spaces. If the last token leaves a character incomplete, that character is omitted.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from kvd.worker.text.fast_tokenizer import FastTokenizer

REPLACEMENT = "\ufffd"

_CONTEXT = 6
"""Tokens of context before the completion; vLLM takes 5. A character has at most 4 bytes."""
_PIECE = 256
"""Tokens whose text is compared at once."""
_MAX_INCOMPLETE = 8
"""Most tokens held back for an incomplete character. With more, their text is sent as it is."""


class Detokenizer(Protocol):
    """Text of one completion: call `push` for each token, then `finish`."""

    @property
    def whole(self) -> bool:
        """Whether the tokens so far end with a whole character."""
        ...

    def push(self, token: int) -> str: ...

    def finish(self) -> str:
        """Return the remaining text without an incomplete character."""
        ...


class BytesTable:
    """The bytes of each token of a byte-level vocabulary."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table

    @staticmethod
    def of(tokenizer: Any, size: int) -> BytesTable | None:
        """Return the table of a Hugging Face tokenizer, or None if it is not byte-level.

        ``size``: the largest id plus one; ids may have gaps.
        """
        # Some classes rewrite decoded text across tokens. A table cannot do that.
        known = ("transformers.tokenization_", FastTokenizer.__module__)
        if not type(tokenizer).decode.__module__.startswith(known):
            return None
        special = special_ids(tokenizer)
        table: list[bytes] = []
        for start in range(0, size, _PIECE):
            tokens = list(range(start, min(start + _PIECE, size)))
            names = tokenizer.convert_ids_to_tokens(tokens)
            piece = [
                b"" if name is None or token in special else bytes_of(name)
                for token, name in zip(tokens, names, strict=True)
            ]
            if decode(tokenizer, tokens) != b"".join(piece).decode("utf-8", "replace"):
                return None
            table += piece
        return BytesTable(table)

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes; empty for ids beyond the tokenizer's vocabulary."""
        return self._table[token] if token < len(self._table) else b""

    def stream(self, after: Sequence[int] = ()) -> Detokenizer:
        return _BytesDecoder(self, after)


class _BytesDecoder:
    def __init__(self, table: BytesTable, after: Sequence[int]) -> None:
        self._bytes_of = table.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt may end inside a character that the completion completes.
        for token in after[-_CONTEXT:]:
            self.push(token)

    @property
    def whole(self) -> bool:
        return not self._decoder.getstate()[0]

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def finish(self) -> str:
        return ""


class ContextDecoder:
    """Decodes each token after the previous ones, because its text may depend on them."""

    def __init__(self, tokenizer: Any, special: frozenset[int], after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._tokens = list(after[-_CONTEXT:])
        """Context tokens, then tokens whose text was not returned yet."""
        self._context_len = len(self._tokens)
        self._context = decode(tokenizer, self._tokens).rstrip(REPLACEMENT)
        self.whole = True

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        self._tokens.append(token)
        text = decode(self._tokenizer, self._tokens)
        incomplete = len(text) <= len(self._context) or text.endswith(REPLACEMENT)
        self.whole = not (incomplete and len(self._tokens) - self._context_len <= _MAX_INCOMPLETE)
        if not self.whole:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(decode(self._tokenizer, self._tokens).rstrip(REPLACEMENT))

    def _advance(self, text: str) -> str:
        new = text[len(self._context) :]
        # Tokens without text do not replace the context: after them alone, the next word would be
        # decoded without its space. But they must not accumulate.
        if new or len(self._tokens) - self._context_len > _MAX_INCOMPLETE:
            del self._tokens[: self._context_len]
            self._context_len = len(self._tokens)
            self._context = decode(self._tokenizer, self._tokens)
        return new


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that `decode` omits."""
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return frozenset(tokenizer.all_special_ids) | added


def decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def _byte_alphabet() -> dict[int, str]:
    """Return the characters that byte-level BPE uses for bytes (GPT-2's ``bytes_to_unicode``).

    Each is mapped to the character with the byte's number, and other characters below 256 to one
    that is no byte.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return (
        dict.fromkeys(others, REPLACEMENT)
        | {byte: chr(byte) for byte in printable}
        | {256 + at: chr(byte) for at, byte in enumerate(others)}
    )


_ALPHABET = _byte_alphabet()


def bytes_of(name: str) -> bytes:
    """Return a byte-level token's bytes from its name, which for added tokens may be any text."""
    try:
        return name.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode("utf-8", "replace")
