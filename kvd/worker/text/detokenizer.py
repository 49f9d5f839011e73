"""Tokens to text, one at a time, never ending inside a character.

Two ways, both right for what they are used for:

* `BytesTable`: byte-level BPE (Qwen, Llama 3, GPT, Mistral's newer ones, the embedded model):
  a token *is* a string of bytes, so a table and an incremental UTF-8 decoder do. It is used only
  if it agrees with the tokenizer's own decoding on the whole vocabulary.
* `ContextDecoder`: everything else (SentencePiece, WordPiece, tokenizers in Python): decode the
  last tokens with and without the new one, and take the difference.

mlx-lm's streaming detokenizers are not used: the one for BPE drops a space at the beginning of
the completion and takes the NUL byte for a letter, and all of them show special tokens.

A completion's text is what the tokenizer's `decode` gives, without special tokens and without
its clean-up of spaces, except for a character that the last token leaves incomplete: it is not
shown at all.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\ufffd"

_CONTEXT = 6
"""Tokens of context before the completion; vLLM takes 5. A character has at most 4 bytes."""

_PATIENCE = 8
"""Tokens that may wait for the end of a character; more of them are no character."""


class Detokenizer(Protocol):
    """The text of one completion: `push` tokens, then `finish`."""

    def push(self, token: int) -> str:
        """Take a token and return the text that it completes."""
        ...

    def finish(self) -> str:
        """Return what is left, less an incomplete character."""
        ...


class BytesTable:
    """What every token of a byte-level vocabulary stands for."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table

    @staticmethod
    def of(tokenizer: Any) -> BytesTable | None:
        """Return the table of a Hugging Face tokenizer, or None if it is not byte-level."""
        # Some classes rewrite what they decoded, across tokens, which no table can do.
        if not type(tokenizer).decode.__module__.startswith("transformers.tokenization_"):
            return None
        count = 1 + max(tokenizer.get_vocab().values())  # more than its length if ids have gaps
        names = tokenizer.convert_ids_to_tokens(list(range(count)))
        special = special_ids(tokenizer)
        table = [
            b"" if name is None or token in special else _bytes_of(name)
            for token, name in enumerate(names)
        ]
        made = BytesTable(table)
        return made if made._agrees(tokenizer) else None

    def _agrees(self, tokenizer: Any) -> bool:
        for start in range(0, len(self._table), 256):
            tokens = list(range(start, min(start + 256, len(self._table))))
            text = b"".join(self._table[start : start + 256]).decode("utf-8", "replace")
            if decode(tokenizer, tokens) != text:
                return False
        return True

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes; models have more logits than their tokenizers have tokens."""
        return self._table[token] if token < len(self._table) else b""

    def stream(self, after: Sequence[int] = ()) -> Detokenizer:
        """Begin a completion that goes on after these tokens."""
        return _BytesDecoder(self, after)


class _BytesDecoder:
    def __init__(self, table: BytesTable, after: Sequence[int]) -> None:
        self._bytes_of = table.bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # A prompt of tokens may end inside a character, which the completion then completes.
        for token in after[-_CONTEXT:]:
            self.push(token)

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of(token))

    def finish(self) -> str:
        return ""


class ContextDecoder:
    """Decodes with the tokens before, since a token's text may depend on them."""

    def __init__(self, tokenizer: Any, special: frozenset[int], after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._tokens = list(after[-_CONTEXT:])
        """Context, then those whose text is not out yet."""
        self._out = len(self._tokens)
        """How many of them are context."""
        self._context = decode(tokenizer, self._tokens).rstrip(REPLACEMENT)

    def push(self, token: int) -> str:
        """Take a token and return the text that it completes."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        text = decode(self._tokenizer, self._tokens)
        waiting = len(self._tokens) - self._out
        if len(text) <= len(self._context) and waiting <= _PATIENCE:
            return ""
        if text.endswith(REPLACEMENT) and waiting <= _PATIENCE:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Return what is left, less an incomplete character."""
        return self._advance(decode(self._tokenizer, self._tokens).rstrip(REPLACEMENT))

    def _advance(self, text: str) -> str:
        new = text[len(self._context) :]
        # What shows nothing is no context for a space, but it must not pile up either.
        if new or len(self._tokens) - self._out > _PATIENCE:
            del self._tokens[: self._out]
            self._out = len(self._tokens)
            self._context = decode(self._tokenizer, self._tokens)
        return new


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that `decode` leaves out."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {
        token for token, content in added if content.special
    }


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Return the tokenizer's own text of these tokens."""
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def _byte_alphabet() -> dict[str, int]:
    """Return the letters that byte-level BPE writes bytes with (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def _bytes_of(name: str) -> bytes:
    """Return a token's bytes from its name; added tokens may have letters of their own."""
    if all(char in _ALPHABET for char in name):
        return bytes(_ALPHABET[char] for char in name)
    return name.encode("utf-8", "replace")
