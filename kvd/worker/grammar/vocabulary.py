"""A model's vocabulary, in the form that grammars need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model, as grammars see them."""

    tokens: Sequence[bytes]
    """Bytes of each token; for special ones their name."""
    special: frozenset[int]
    """Tokens that no text matches, only their id: special tokens, and markers."""
    eos_ids: frozenset[int]
    encode: Callable[[str], list[int]]
    """Tokenizes text without special tokens."""
    canonical: bool
    """Whether ``encode`` returns tokens with exactly the bytes of the text. If not, text that a
    grammar forces may be drawn in any tokens."""


class TokenTable:
    """The form in which llguidance takes a vocabulary."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special | vocabulary.eos_ids)
        self.eos_token_id = min(vocabulary.eos_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)
