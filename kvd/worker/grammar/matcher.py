"""The state of one completion in its grammar, and the masks of several completions.

A mask has a bit for each token of the vocabulary, packed into bytes, the lowest bit first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from protocol.errors import InvalidRequest, KvdError, Overloaded, shorten

Mask = NDArray[np.uint8]


def shown(reason: str) -> str:
    """Return a reason of llguidance in one short line."""
    return shorten(" ".join(reason.replace("<non-verbose/>", "").split()), 300)


class Matcher:
    """One completion's state: call `push` for each of its tokens.

    ``grammar``: an `LLMatcher` at the grammar's beginning, which the matcher owns.
    """

    def __init__(
        self, grammar: Any, eos_ids: frozenset[int], vocabulary: int, *, optional: bool = False
    ) -> None:
        self.grammar: Any = grammar
        self.optional = optional
        """Whether the completion goes on without the grammar if that cannot be followed."""
        self.vocabulary = vocabulary
        """Tokens of the tokenizer."""
        self.mask: Mask | None = None
        """The mask of the next token, if it was computed already."""
        self.first: Mask | None = None
        """The mask of the first token over the tokenizer's tokens, from the compilation."""
        self.nbytes = 0
        """Bytes of the grammar, as measured at its compilation."""
        self.given_up = False
        """Whether memory is too short to follow the grammar any further."""
        self._eos_ids = eos_ids
        self._ahead: int | None = None
        """A token that the matcher advanced by before `push`."""

    def push(self, token: int) -> None:
        """Advance by a token that the mask allowed."""
        if self._ahead == token:
            self._ahead = None
            return
        self.settle()
        self.mask = self.first = None
        if not self.grammar.is_stopped():
            self.grammar.consume_token(token)

    def push_ahead(self, token: int) -> None:
        """Advance by a token that was drawn; `push` follows, or `settle` if the draw is dropped."""
        self.settle()
        self.mask = self.first = None
        if not self.grammar.is_stopped() and self.grammar.consume_token(token):
            self._ahead = token

    def settle(self) -> None:
        """Return to the state after the last pushed token."""
        if self._ahead is not None:
            self._ahead = self.mask = None
            self.grammar.rollback(1)

    @property
    def failed(self) -> bool:
        """Whether the grammar cannot be followed any further."""
        return self.given_up or bool(self.grammar.is_error())

    def give_up(self) -> None:
        """Follow the grammar no further, because memory is short."""
        self.given_up = True
        self.mask = self.first = None

    @property
    def complete(self) -> bool:
        """Whether the answer matches and no token may continue it. Computes a mask."""
        if self.failed or not self.grammar.is_accepting():
            return False
        if self.mask is not None:
            mask = self.mask.copy()
        else:
            mask = np.frombuffer(bytearray(self.grammar.compute_bitmask()), np.uint8)
        self.limit(mask, (), may_end=True)
        return self.grammar.is_stopped() or not mask.any()

    def limit(self, mask: Mask, ends: Collection[int], *, may_end: bool) -> None:
        """Adjust the mask to the tokens that end the completion.

        ``ends``: these tokens. Other end tokens of the model are excluded: in a completion that
        ignores them they would be text. ``may_end``: False until ``min_tokens``.
        """
        excluded = self._eos_ids.difference(ends if may_end else ())
        for token in excluded if may_end else excluded.union(ends):
            mask[token >> 3] &= 0xFF ^ (1 << (token & 7))

    def failure(self) -> KvdError | None:
        """Return why no token is allowed; None: the grammar is complete."""
        if self.given_up:
            return Overloaded(
                "memory is too short to follow the grammar; retry later, or simplify it",
                retry_after_s=1.0,
            )
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
    """Computes the masks of several matchers in one call.

    ``vocabulary``: tokens of the model. ``threads``: how many compute; 1: the calling one, which
    then holds Python's lock.
    """

    def __init__(self, vocabulary: int, threads: int = 1) -> None:
        self._vocabulary = vocabulary
        self._executor: Any = LLExecutor(num_threads=threads) if threads > 1 else None

    def fill(self, matchers: Sequence[Matcher | None]) -> Mask:
        """Return the masks, ``[matchers, bytes]``. All tokens are allowed without a matcher.

        A matcher that fails has an empty mask. Masks that were computed already are copied.
        """
        for one in matchers:
            if one is not None and one.mask is None and one.first is not None:
                words = np.zeros((1, (self._vocabulary + 31) // 32), np.int32)
                count = min(one.first.size, words.nbytes)
                words.view(np.uint8)[0, :count] = one.first[:count]
                one.mask = self._with_logits(words)[0]
        new = [one for one in matchers if one is not None and one.mask is None]
        if new:
            self.fill_ahead(new)
        words = allocate_token_bitmask(len(matchers), self._vocabulary)
        masks: Mask = words.view(np.uint8)
        for row, matcher in enumerate(matchers):
            if matcher is not None and matcher.mask is not None:
                masks[row] = matcher.mask
        return masks

    def fill_ahead(self, matchers: Sequence[Matcher]) -> None:
        """Compute `Matcher.mask` of each of them."""
        size = max([self._vocabulary, *(one.vocabulary for one in matchers)])
        words: NDArray[np.int32] = allocate_token_bitmask(len(matchers), size)
        followed = [(one.grammar, row) for row, one in enumerate(matchers) if not one.failed]
        if followed and self._executor is not None:
            fill_next_token_bitmask_par(self._executor, followed, words)
        else:
            width = words.itemsize * words.shape[1]
            for grammar, row in followed:
                grammar.unsafe_compute_mask_ptr(words.ctypes.data + row * width, width)
        masks = self._with_logits(words)
        for matcher, mask in zip(matchers, masks, strict=True):
            if matcher.failed:
                mask[:] = 0
            matcher.mask = mask

    def _with_logits(self, words: NDArray[np.int32]) -> Mask:
        """Return masks without tokens of the tokenizer for which the model has no logit."""
        masks = words.view(np.uint8)[:, : (self._vocabulary + 31) // 32 * 4]
        for token in range(self._vocabulary, 8 * masks.shape[1]):
            masks[:, token >> 3] &= 0xFF ^ (1 << (token & 7))
        return masks
