"""The state of one completion in its grammar, and the masks of several completions.

A mask has a bit for each token of the vocabulary, packed into bytes, the lowest bit first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from protocol.errors import InvalidRequest, KvdError, shorten

Mask = NDArray[np.uint8]


def shown(reason: str) -> str:
    """Return a reason of llguidance in one short line."""
    return shorten(" ".join(reason.replace("<non-verbose/>", "").split()), 300)


class Matcher:
    """One completion's state: call `push` for each of its tokens.

    ``grammar``: an `LLMatcher` at the grammar's beginning, which the matcher owns.
    """

    def __init__(self, grammar: Any, eos_ids: frozenset[int], vocabulary: int) -> None:
        self.grammar: Any = grammar
        self.vocabulary = vocabulary
        """Tokens of the model and of the tokenizer, whichever are more."""
        self._eos_ids = eos_ids
        self._ended = False

    def push(self, token: int) -> None:
        """Advance by a token that the mask allowed."""
        if not self.grammar.is_stopped():
            self.grammar.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the answer matches and no token may continue it. Computes a mask."""
        if self.grammar.is_error() or not self.grammar.is_accepting():
            return False
        mask = np.frombuffer(bytearray(self.grammar.compute_bitmask()), np.uint8)
        return self.grammar.is_stopped() or not self.limit(mask, (), may_end=True)

    def limit(self, mask: Mask, ends: Collection[int], *, may_end: bool) -> bool:
        """Adjust the mask to the tokens that end the completion; return whether any token is left.

        ``ends``: these tokens. Other end tokens of the model are excluded: in a completion that
        ignores them they would be text. ``may_end``: False until ``min_tokens``.
        """
        excluded = self._eos_ids.difference(ends if may_end else ())
        for token in excluded if may_end else excluded.union(ends):
            mask[token >> 3] &= 0xFF ^ (1 << (token & 7))
        return bool(mask.any())

    def failure(self) -> KvdError | None:
        """Return why no token is allowed; None: the grammar is complete."""
        if self.grammar.is_error():
            reason = shown(self.grammar.get_error())
            return InvalidRequest(
                f"the grammar cannot be followed any further: {reason}; simplify it",
                field="grammar",
            )
        if self.grammar.is_accepting():
            return None
        return InvalidRequest(
            "no token of the model continues the answer by its grammar; change the grammar",
            field="grammar",
        )


class MaskFiller:
    """Computes the masks of several matchers in one call."""

    def __init__(self) -> None:
        self._executor: Any = LLExecutor(num_threads=None)

    def fill(self, matchers: Sequence[Matcher | None], vocabulary: int) -> Mask:
        """Return the masks, ``[matchers, bytes]``. All tokens are allowed without a matcher.

        ``vocabulary``: tokens of the model. A matcher that fails has an empty mask.
        """
        size = max([vocabulary, *(one.vocabulary for one in matchers if one is not None)])
        words: NDArray[np.int32] = allocate_token_bitmask(len(matchers), size)
        pairs: list[tuple[LLMatcher, int]] = []
        for row, matcher in enumerate(matchers):
            if matcher is None:
                continue
            if matcher.grammar.is_error():
                words[row] = 0
            else:
                pairs.append((matcher.grammar, row))
        if pairs:
            fill_next_token_bitmask_par(self._executor, pairs, words)
        for grammar, row in pairs:
            if grammar.is_error():
                words[row] = 0
        return words.view(np.uint8)
