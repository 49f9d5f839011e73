"""The text of single tokens, as logprobs show them.

The text of a completion differs (`kvd.worker.text.detokenizer`): it omits special tokens, and a
character may be spread over several tokens.
"""

from __future__ import annotations

import re
from typing import Any

from kvd.worker.text.detokenizer import REPLACEMENT, BytesTable
from protocol.types import Alternative

# SentencePiece's notations for a byte that is no character, and for a space.
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TokenTexts:
    """Texts of one tokenizer's tokens, cached."""

    def __init__(
        self, tokenizer: Any, table: BytesTable | None, special: frozenset[int], size: int
    ) -> None:
        """``size``: the largest id plus one."""
        self._tokenizer = tokenizer
        self._table = table
        self._special = special
        self.size = size
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def of(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text, and its bytes if the text does not represent them."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def alternative(self, token: int, logprob: float) -> Alternative:
        text, raw = self.of(token)
        return Alternative(token, text, logprob, raw)

    def raw(self, token: int) -> bytes:
        """Return a token's bytes; the name of a special token; nothing for an unused id."""
        text, raw = self._find(token)
        return text.encode("utf-8", "surrogatepass") if raw is None else bytes(raw)

    def _find(self, token: int) -> tuple[str, list[int] | None]:
        # Models may have more logits than the tokenizer has tokens, and ids may have gaps.
        name = self._tokenizer.convert_ids_to_tokens(token) if token < self.size else None
        if name is None:
            return "", None
        if token in self._special:
            return str(name), None
        if self._table is not None:
            raw = self._table.bytes_of(token)
        elif (byte := _BYTE.fullmatch(name)) is not None:
            raw = bytes([int(byte[1], 16)])
        else:
            return str(name).replace(_SPACE, " "), None
        text = raw.decode("utf-8", "replace")
        return text, list(raw) if REPLACEMENT in text else None
