"""A model's vocabulary, in the form that grammars need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

_CACHED_TEXTS = 1024
_CACHED_CHARS = 64
"""Characters of a text whose tokens are kept. Grammars force the same short texts, such as keys,
again and again: tokenizing them took half of the time of masks (80 us each)."""

_PLAIN = r'[^"\\\x00-\x1F\x7F]'
"""A character that a JSON string contains as it is."""
SLICES = [*(f"{_PLAIN}{{1,{most}}}" for most in (3, 5, 7, 10, 30)), f"{_PLAIN}+"]
"""Expressions of llguidance's slices. A token belongs to the first one that matches it. If any text
of a slice may follow, its tokens are allowed without a walk through them.

llguidance's own slices begin at 10 characters, and one is for whitespace. The slowest masks are
those of strings that may have 3 to 9 further characters. With Qwen3's 151,644 tokens, masks take
0.83 to 0.89 ms of CPU time at p99 (`bench.masks`), and without the slice of up to 3 characters 0.91
to 1.07. That slice uses 5 MB. A slice for each length uses 35 MB more and is not faster.
"""


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
        self._encode_short = lru_cache(_CACHED_TEXTS)(vocabulary.encode)

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text.decode() if isinstance(text, bytes) else text
        return self._encode_short(whole) if len(whole) <= _CACHED_CHARS else self._encode(whole)
